"""Faults of the links between nodes and of whole nodes: dropped, late or limited packets, killed or slow nodes, and the
kernel's counters that prove the faults.

Input: nodes and parameters. Output: rules in the nodes' own network namespaces, and counters of the job's own
connections."""
