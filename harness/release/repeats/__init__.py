"""Repetitions of one scenario: the distributions of the measured values, and verdicts on the share of runs that
pass."""
