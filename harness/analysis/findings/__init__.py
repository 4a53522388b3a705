"""What can be said of a run: of its resumes, checkpoints, samples, parameters and learning rates. An assertion asks one
of these, with the bounds of the scenario, and so can an assertion of another package."""
