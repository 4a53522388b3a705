"""checkpoint.flip_bits, .zero_block and .nan: change some bytes of a checkpoint, but not its length. Most loaders
accept them without an error."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchaos.plugin import Count
from torchaos.plugin.families.checkpoints import Checkpoint, CheckpointFault, Edit, flips, nan, shard, stretch, zeros


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
