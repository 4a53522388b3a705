"""Faults in this rank: what fires them at their Moments, and what an injector works with."""
