"""How a job ended: well, with an error, in the middle of its shutdown, or before its first step. Pure."""
