"""Judges the checkpoints of a run: which were saved, loaded and damaged, how they differ from the twin's, and where the
job resumed. In: records, with the inventory of the checkpoints. Out: findings and facts for assertions. No file is
read."""
