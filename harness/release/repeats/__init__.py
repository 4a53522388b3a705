"""One scenario run many times: distributions of the measured figures, and verdicts on the share of runs that pass."""
