"""Where and when each fault hit, and whom. Pure."""
