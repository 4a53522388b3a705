"""checkpoint.truncate, .torn_write, .delete and .partial: part of a checkpoint never reached the disk, or is gone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchaos.harness.checkpoints.layout import Checkpoint
from torchaos.harness.mechanics.checkpoints import edits, spots
from torchaos.harness.mechanics.checkpoints.edits import Edit
from torchaos.plugin import CheckpointFault, Count, Share


@dataclass(frozen=True)
class Truncate(CheckpointFault):
    """One file of tensors ends early: after the share `keep` of its length (0 to 1), or at a place that the seed
    draws."""

    keep: Share | None = None
    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.truncate"

    def edits(self, one: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [spots.cut(spots.shard(one, draw), self.keep, draw)]


@dataclass(frozen=True)
class TornWrite(CheckpointFault):
    """One file has its full length, but zeros from some block on: its size reached the disk before a crash, and its
    data did not."""

    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.torn_write"

    def edits(self, one: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [spots.torn(spots.shard(one, draw), draw)]


@dataclass(frozen=True)
class Delete(CheckpointFault):
    """One file is deleted. `what`: a file that holds tensors (`shard`) or a file that describes them (`metadata`)."""

    what: Literal["shard", "metadata"] = "shard"
    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.delete"

    def edits(self, one: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        find = spots.shard if self.what == "shard" else spots.metadata
        return [edits.Remove(find(one, draw))]


@dataclass(frozen=True)
class Partial(CheckpointFault):
    """The folder exists with only a part of its files. The files that describe the others and half of the others are
    missing, and one file is cut off."""

    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.partial"

    def edits(self, one: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return spots.partial(one, draw)
