"""process.hold_gil: no Python thread of the rank runs for a time, as if a C extension never releases the interpreter
lock."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Irreversible, NodeSite, RankSite, Record, Seconds
from torchaos.plugin.evidence import stood_still


@dataclass(frozen=True)
class HoldGil(Fault):
    """Sleeps in C for `time` seconds while it holds the interpreter lock, so heartbeat and watchdog threads in Python
    stop too."""

    time: Seconds = 5.0

    name = "process.hold_gil"
    where = ("rank",)
    needs = frozenset({"agent"})

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible(f"the lock is released without an undo after {self.time} s")

    def apply(self, site: RankSite) -> None:
        ctypes.PyDLL(None).usleep(int(self.time * 1e6))  # PyDLL, unlike CDLL, keeps the lock

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return stood_still(record, fault, self.time)
