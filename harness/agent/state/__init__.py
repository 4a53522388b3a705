"""The state of training, such as parameters and moments, in check sums: after each step, and by name where a run may be
resumed."""
