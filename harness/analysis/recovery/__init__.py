"""Finds when training continued after a fault, and how long each part of the recovery took. Input: a record, or the
events of a live run, and histories of twins. Output: the end of the recovery, its parts in seconds, and the steps that
were lost."""
