"""Runs a scenario together with its twins, which are fault-free runs for comparison, and keeps a cache of twins. Input:
a plan. Output: a judged run directory with the records of its twins."""
