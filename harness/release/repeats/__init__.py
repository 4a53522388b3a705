"""One scenario run many times: what was measured as distributions, and verdicts on the rate of those that pass."""
