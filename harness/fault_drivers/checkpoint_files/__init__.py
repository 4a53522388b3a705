"""Damage to checkpoints on disk: which bytes a fault changes, and how each change is recorded.

Input: the layout of a checkpoint (checkpoints/) and a random stream. Output: edits of its files. Nothing here needs
torch."""
