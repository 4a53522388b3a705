"""Faults of nodes that are containers, applied through the Docker engine of this machine."""
