"""storage.slow and .stall: the file system of the checkpoints is slow, or does not answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchaos.plugin import Positive, Seconds, drawn
from torchaos.plugin.families.storage import Rules, StorageFault, operations


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
