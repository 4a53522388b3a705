"""checkpoint.stale_shard and .foreign_shard: every file is whole, but one file does not belong to this checkpoint."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Count
from torchaos.plugin.families.checkpoints import Checkpoint, CheckpointFault, Edit, foreign, stale


@dataclass(frozen=True)
class StaleShard(CheckpointFault):
    """Replaces one file of tensors by the file of the next older checkpoint, as after a lost write or a wrong copy."""

    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.stale_shard"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [stale(checkpoint, others, draw)]


@dataclass(frozen=True)
class ForeignShard(CheckpointFault):
    """Replaces one rank's file of tensors by another rank's file."""

    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.foreign_shard"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [foreign(checkpoint, draw)]
