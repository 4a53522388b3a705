"""Compares a run with its twins (the same job without a fault), and finds the most likely cause of a difference. Input:
the records of the run and its twins. Output: differences in losses, learning rates, parameters and checkpoints, and
findings about them."""
