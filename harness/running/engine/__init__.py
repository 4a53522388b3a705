"""Carries out a plan: the stages of a run, and the life of each fault. Input: a plan and an empty run directory.
Output: a complete run directory, and the machine in its earlier state. The code here knows no particular fault,
assertion or platform."""
