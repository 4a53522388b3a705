"""Functions with which assertions check a run: its resumes, checkpoints, samples, parameters and learning rates. An
assertion, also of another package, passes the bounds of the scenario and gets a `Finding`."""
