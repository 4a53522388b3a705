"""Damage to checkpoints on disk: which bytes a fault changes, and how each change is recorded.

The layout of a checkpoint (checkpoints/) and a random stream come in; edits of its files go out. Nothing here needs
torch.
"""
