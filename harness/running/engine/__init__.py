"""Carries a plan out: the stages of a run, and the life of each fault. It knows no particular fault, assertion or
platform."""
