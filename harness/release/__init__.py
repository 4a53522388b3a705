"""Judges many runs together: a release gate over several scenarios, and repetitions of one scenario. Input: results and
run directories. Output: one verdict about all of them. No job is started here."""
