"""Finds the time of each hit of a fault, the attempt, and the ranks, nodes and GPUs that it hit. Input: a record, or
the events of a live run. Output: landings and targets."""
