"""process.freeze: the rank stops without an error: the classic silent hang. `for` is the duration."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Handle, NodeSite, Record
from torchaos.plugin.evidence import stopped
from torchaos.plugin.undo import Process


@dataclass(frozen=True)
class Freeze(Fault):
    """Sends SIGSTOP to the rank, and SIGCONT when the fault is undone."""

    name = "process.freeze"
    where = ("node",)
    needs = frozenset({"pidfd"})

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [Process.of(pid, "resume") for pid in site.pids]

    def apply(self, site: NodeSite) -> None:
        site.signal(signal.SIGSTOP)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGSTOP), *([(duration_s, signal.SIGCONT)] if duration_s is not None else [])]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return stopped(record, fault)
