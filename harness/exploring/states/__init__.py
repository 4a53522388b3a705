"""Which contents of the checkpoint folder a death can leave. One module for each model of death."""
