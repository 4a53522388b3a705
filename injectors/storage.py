"""The file system of the checkpoints.

- storage.error, storage.fsync_error, storage.read_only, storage.full: it refuses operations
- storage.slow, storage.stall: it is slow, or does not answer
- storage.fill: the file system that job.checkpoints.size makes is filled until `left` bytes are free"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchaos.plugin import Positive, Seconds, Size, drawn
from torchaos.plugin.families.storage import GROWS, SYNCS, FillFault, Rules, StorageFault, operations


@dataclass(frozen=True)
class Error(StorageFault):
    """Reads or writes (`on`) under the checkpoint folder fail with `error`."""

    error: Literal["EIO", "ENOSPC", "EDQUOT", "ESTALE", "EROFS", "EACCES"] = "EIO"
    on: Literal["writes", "reads", "both"] = "writes"
    ranks: tuple[int, ...] = drawn()

    name = "storage.error"

    def rules(self) -> Rules:
        return Rules(operations(self.on), self.ranks, self.error)


@dataclass(frozen=True)
class FsyncError(StorageFault):
    """fsync fails with `error`: the written data may never have been written to the disk."""

    error: Literal["EIO", "ENOSPC", "EDQUOT"] = "EIO"
    ranks: tuple[int, ...] = drawn()

    name = "storage.fsync_error"

    def rules(self) -> Rules:
        return Rules(tuple(sorted(SYNCS)), self.ranks, self.error)


@dataclass(frozen=True)
class ReadOnly(StorageFault):
    """Nothing can be written, as if the kernel had mounted the file system read-only after errors."""

    ranks: tuple[int, ...] = drawn()

    name = "storage.read_only"

    def rules(self) -> Rules:
        return Rules(operations("writes"), self.ranks, "EROFS")


@dataclass(frozen=True)
class Full(StorageFault):
    """The file system is full after `left` more bytes have been written; removing files frees no space."""

    left: Size = 0
    ranks: tuple[int, ...] = drawn()

    name = "storage.full"

    def rules(self) -> Rules:
        return Rules(tuple(sorted(GROWS)), self.ranks, "ENOSPC", left=self.left)


@dataclass(frozen=True)
class Slow(StorageFault):
    """Each read or write (`on`) takes `delay` longer, with at most `rate` bytes per second."""

    delay: Seconds = 0.05
    rate: Positive | None = None
    on: Literal["writes", "reads", "both"] = "writes"
    ranks: tuple[int, ...] = drawn()

    name = "storage.slow"

    def rules(self) -> Rules:
        return Rules(operations(self.on), self.ranks, delay_s=self.delay, rate=self.rate)


@dataclass(frozen=True)
class Stall(StorageFault):
    """Operations (`on`) on the folder hang. Even SIGKILL does not end a process that waits, as on a hard NFS mount
    whose server is gone. `for` is the duration. While the creation of a file hangs, the kernel keeps its folder locked,
    so other processes may have to wait there too."""

    on: Literal["writes", "reads", "all"] = "all"
    ranks: tuple[int, ...] = drawn()

    name = "storage.stall"

    def rules(self) -> Rules:
        return Rules(operations(self.on), self.ranks, stall=True)


@dataclass(frozen=True)
class Fill(FillFault):
    """A file of torchaos takes all space except `left` bytes, so every rank and every open file is hit. Space that the
    job frees can be used again."""

    left: Size = 0

    name = "storage.fill"
