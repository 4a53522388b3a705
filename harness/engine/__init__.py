"""Carries a plan out: the stages of a run, the life of each fault, the twin. It knows no particular fault either."""
