"""Faults in this rank: what fires a fault at its Moment, and what an injector works with."""
