"""How a Toxiproxy server is asked: `api` from this process, `client` inside the network that the server is in."""
