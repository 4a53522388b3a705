"""The release gate: which runs count, what they are held to in an environment, and what is waived for how long."""
