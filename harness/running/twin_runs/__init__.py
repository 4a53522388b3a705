"""Runs a scenario together with its twins, which are runs without faults for comparison, and keeps a cache of twins.
Input: a plan. Output: a judged run directory with the records of its twins."""
