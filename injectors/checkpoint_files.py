"""The files of a checkpoint are damaged. Most loaders accept changed bytes without an error.

- checkpoint.flip_bits, checkpoint.zero_block, checkpoint.nan: some bytes are changed, but not the length
- checkpoint.truncate, checkpoint.torn_write, checkpoint.delete, checkpoint.partial: a part was never written to the
  disk, or is gone
- checkpoint.stale_shard, checkpoint.foreign_shard: every file is whole, but one does not belong to this checkpoint
- checkpoint.tracker, checkpoint.permissions: the checkpoint itself is whole, but the file that names it is wrong, or a
  file can't be read"""

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


@dataclass(frozen=True)
class FlipBits(CheckpointFault):
    """Inverts `bits` bits. `place`: in one tensor, or in the files that describe the tensors."""

    bits: Count = 1
    place: Literal["tensor", "metadata"] = "tensor"
    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.flip_bits"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return flips(stretch(checkpoint, self.place, draw), self.bits, draw)


@dataclass(frozen=True)
class ZeroBlock(CheckpointFault):
    """Sets `bytes` bytes of one file to zero, as after a lost block. They begin at a multiple of `bytes` from the
    file's start."""

    bytes: Count = 4096
    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.zero_block"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [zeros(shard(checkpoint, draw), self.bytes, draw)]


@dataclass(frozen=True)
class Nan(CheckpointFault):
    """Sets one value of a floating-point tensor to NaN. `fix_crc`: also corrects the CRC that the format keeps of the
    tensor, as if the NaN had been in memory at the save. Then only the contents show the damage."""

    fix_crc: bool = False
    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.nan"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return nan(checkpoint, self.fix_crc, draw)


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


@dataclass(frozen=True)
class Tracker(CheckpointFault):
    """Spoils the file that names the newest checkpoint (`latest`, `latest_checkpointed_iteration.txt`). `how`: the file
    becomes empty, or names an older checkpoint."""

    how: Literal["empty", "stale"] = "empty"
    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.tracker"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [tracker(checkpoint, others, self.how)]


@dataclass(frozen=True)
class Permissions(CheckpointFault):
    """Removes every user's permission to read one file of tensors. Root can still read it, so a job that runs as root
    does not feel the fault."""

    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.permissions"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [Mode(shard(checkpoint, draw), 0)]
