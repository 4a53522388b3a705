"""Requests to a Toxiproxy server. `api` makes them in the harness; `client` is a process that sends them in the
server's network."""
