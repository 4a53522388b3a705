"""Damage to the newest checkpoints."""

from torchaos.harness.checkpoints.layout import Checkpoint
from torchaos.harness.fault_drivers.checkpoint_damage import CheckpointFault
from torchaos.harness.fault_drivers.checkpoint_edits import (
    Edit,
    Mode,
    Remove,
    cut,
    flips,
    foreign,
    metadata,
    nan,
    partial,
    shard,
    stale,
    stretch,
    torn,
    tracker,
    zeros,
)

__all__ = [
    "Checkpoint", "CheckpointFault", "Edit", "Mode", "Remove", "cut", "flips", "foreign", "metadata", "nan",
    "partial", "shard", "stale", "stretch", "torn", "tracker", "zeros",
]  # fmt: skip
