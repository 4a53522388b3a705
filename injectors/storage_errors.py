"""storage.error, .fsync_error, .read_only and .full: the file system of the checkpoints refuses operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchaos.plugin import Size, drawn
from torchaos.plugin.families.storage import GROWS, SYNCS, Rules, StorageFault, operations


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
