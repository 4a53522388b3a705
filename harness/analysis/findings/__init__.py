"""The questions of assertions about a run: about its resumes, checkpoints, samples, parameters and learning rates. An
assertion, also of another package, asks such a question with the bounds of the scenario, and gets a `Finding`."""
