"""checkpoint.stale_shard and .foreign_shard: every file is whole, and one of them is not the one that belongs there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.harness.checkpoints.layout import Checkpoint
from torchaos.harness.mechanics.checkpoints import spots
from torchaos.harness.mechanics.checkpoints.edits import Edit
from torchaos.plugin import CheckpointFault, Count


@dataclass(frozen=True)
class StaleShard(CheckpointFault):
    """One file of tensors is that of the next older checkpoint, as after a write that was lost or a wrong copy."""

    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.stale_shard"

    def edits(self, one: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [spots.stale(one, others, draw)]


@dataclass(frozen=True)
class ForeignShard(CheckpointFault):
    """One rank's file of tensors holds what another rank's file holds."""

    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.foreign_shard"

    def edits(self, one: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [spots.foreign(one, draw)]
