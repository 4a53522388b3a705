"""The release gate: which runs count, which bounds hold in an environment, and which failures are waived until when."""
