"""Clusters of this one machine, for tests: each node is a set of namespaces. They run real programs of Slurm and
Kubernetes."""
