"""The release gate: which runs count, which bounds hold in an environment, and what is waived until when."""
