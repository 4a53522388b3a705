"""Steps and losses: the hooks of backwards and optimizer steps, and what they collect for the event of each step."""
