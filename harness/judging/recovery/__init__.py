"""Finds when training went on after a fault, and how long each part of the recovery took. In: a record, or the events
of a live run, and histories of twins. Out: the end of the recovery, its parts in seconds, and the steps that were
lost."""
