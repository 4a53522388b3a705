"""Finds out how a job ended: successfully, with an error, by an abort during its shutdown, or before its first step.
Input: a record. Output: exit codes, failed ranks, and clauses for reasons."""
