"""Nodes that are containers of a Docker engine on this machine, through the `docker` package."""
