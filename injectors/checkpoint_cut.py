"""checkpoint.truncate, .torn_write, .delete and .partial: part of a checkpoint was never written to the disk, or is
gone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchaos.plugin import Count, Share
from torchaos.plugin.families.checkpoints import (
    Checkpoint,
    CheckpointFault,
    Edit,
    Remove,
    cut,
    metadata,
    partial,
    shard,
    torn,
)


@dataclass(frozen=True)
class Truncate(CheckpointFault):
    """Cuts off the end of one file of tensors: after the share `keep` of its length (0 to 1), or at a place that the
    seed draws."""

    keep: Share | None = None
    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.truncate"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [cut(shard(checkpoint, draw), self.keep, draw)]


@dataclass(frozen=True)
class TornWrite(CheckpointFault):
    """Fills one file with zeros from some block to its end, and keeps its length. That happens when a crash comes after
    the size was written to the disk, and before the data was."""

    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.torn_write"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [torn(shard(checkpoint, draw), draw)]


@dataclass(frozen=True)
class Delete(CheckpointFault):
    """Deletes one file. `what`: a file that holds tensors (`shard`) or a file that describes them (`metadata`)."""

    what: Literal["shard", "metadata"] = "shard"
    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.delete"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        find = shard if self.what == "shard" else metadata
        return [Remove(find(checkpoint, draw))]


@dataclass(frozen=True)
class Partial(CheckpointFault):
    """Leaves only a part of the files in the folder. Half of the files with tensors and all files that describe them
    are deleted, and one file is cut off."""

    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.partial"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return partial(checkpoint, draw)
