"""Runs one scenario with its twins, the fault-free runs that it is judged against, and keeps a cache of twins. In: a
plan. Out: a judged run directory with the records of its twins."""
