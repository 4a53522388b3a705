"""storage.slow and .stall: the file system of the checkpoints takes its time, or never answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchaos.harness.mechanics.storage import rules
from torchaos.harness.mechanics.storage.rules import Rules
from torchaos.plugin import Positive, Seconds, StorageFault, drawn


@dataclass(frozen=True)
class Slow(StorageFault):
    """Each read or write (`on`) takes `delay` longer, and at most `rate` bytes per second get through."""

    delay: Seconds = 0.05
    rate: Positive | None = None
    on: Literal["writes", "reads", "both"] = "writes"
    ranks: tuple[int, ...] = drawn()

    name = "storage.slow"

    def rules(self) -> Rules:
        return rules.Rules(rules.operations(self.on), self.ranks, delay_s=self.delay, rate=self.rate)


@dataclass(frozen=True)
class Stall(StorageFault):
    """What touches the folder (`on`) hangs, and not even SIGKILL ends who waits, as on a hard NFS mount whose server is
    gone. `for` says how long. The kernel locks a folder in which a file is being made: others may have to wait there
    too."""

    on: Literal["writes", "reads", "all"] = "all"
    ranks: tuple[int, ...] = drawn()

    name = "storage.stall"

    def rules(self) -> Rules:
        return rules.Rules(rules.operations(self.on), self.ranks, stall=True)
