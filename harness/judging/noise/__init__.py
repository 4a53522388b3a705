"""How far two healthy runs of one job may be apart, for each quantity and each step. Pure.

Values of several twins come in; a tolerance goes out. It is never learned from the run that is judged."""
