"""One scenario that is run many times: the distributions of the measured values, and verdicts on the share of runs that
pass."""
