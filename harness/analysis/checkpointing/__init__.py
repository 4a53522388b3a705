"""Judges the checkpoints of a run: which were saved, loaded and damaged, how they differ from the twin's, and from
which checkpoint the job resumed. Input: records, with the inventory of the checkpoints. Output: findings and facts for
assertions. No file is read."""
