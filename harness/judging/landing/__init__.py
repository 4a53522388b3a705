"""Finds when each fault hit, in which attempt, and which ranks, nodes and GPUs. In: a record, or the events of a live
run. Out: landings and targets."""
