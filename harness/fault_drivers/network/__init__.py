"""Faults of the links between nodes: dropped, late or limited packets, and the kernel's counters that prove them.
Faults of whole nodes are in fault_drivers/node_faults.py.

Input: nodes and parameters. Output: rules in the nodes' own network namespaces, and counters of the job's own
connections."""
