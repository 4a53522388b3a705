"""Requests to a Toxiproxy server: `api` sends them from the harness, `client` is a process in the server's network."""
