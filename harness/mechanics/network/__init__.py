"""Faults of the links between nodes and of whole nodes: cuts, delays, limits, and the kernel's counters that prove
them.

Nodes and parameters come in. Rules in the nodes' own network namespaces go out, and counters of the job's own
connections.
"""
