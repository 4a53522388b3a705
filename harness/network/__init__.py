"""Nodes that are network namespaces of one machine, and what is done to the links between them."""
