"""Computes by how much two healthy runs of a job may differ, for each quantity and each step. Input: the steps of
several twins. Output: a tolerance. It is never learned from the run that is judged."""
