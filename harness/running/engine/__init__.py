"""Carries out a plan: the stages of a run, and the life of each fault. In: a plan and an empty run directory. Out: a
complete run directory, and a machine as it was before. No particular fault, assertion or platform is known here."""
