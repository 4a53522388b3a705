"""The release gate. It decides which runs count, which bounds hold in an environment, and until when a failure is
waived."""
