"""Compares a run with its twins, the same job without a fault, and finds the likeliest cause of a difference. In: the
records of the run and its twins. Out: differences in losses, learning rates, parameters and checkpoints, and findings
about them."""
