"""Faults of the links between nodes and of whole nodes: cuts, delays, limits, throttling, and what the kernel counts of
it.

Nodes and parameters come in; rules in the nodes' own network namespaces go out, and counts of the job's own
connections."""
