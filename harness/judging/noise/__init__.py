"""Says by how much two healthy runs of a job may differ, for each quantity and each step. In: the steps of several
twins. Out: a tolerance. It is never learned from the run that is judged."""
