"""Faults of the links between nodes and of whole nodes: cuts, delays, limits, and the kernel's counters that prove
them.

Input: nodes and parameters. Output: rules in the nodes' own network namespaces, and counters of the job's own
connections."""
