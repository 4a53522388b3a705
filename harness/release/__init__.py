"""Judges many runs together: a release gate over several scenarios, and repetitions of one scenario.

Input: results and run directories. Output: one verdict about all of them. Nothing is started here."""
