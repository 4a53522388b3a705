"""Carries out a scenario: plans it, starts the job, applies each fault at its Moment (the planned attempt, step and
phase), undoes it, and records everything.

Input: a scenario. Output: a run directory. Verdicts, gates and reports are made later, from that directory alone. The
code here does not judge whether the job recovered."""
