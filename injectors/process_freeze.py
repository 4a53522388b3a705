"""process.freeze: the rank stops dead and nobody is told: the classic silent hang. `for` says how long."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Freeze(Fault):
    """SIGSTOP to the rank, SIGCONT when it is rolled back."""

    name: ClassVar[str] = "process.freeze"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd"})

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        from torchaos.harness.undo.handles import Process

        return [Process.of(pid, "resume") for pid in site.pids]

    def apply(self, site: NodeSite) -> None:
        site.signal(signal.SIGSTOP)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGSTOP), *([(duration_s, signal.SIGCONT)] if duration_s is not None else [])]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.evidence import stopped

        return stopped(record, fault)
