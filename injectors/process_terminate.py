"""process.terminate: notice, a grace period, then death, as in a spot preemption or a scheduler's cancel."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.quantities import Seconds
from torchaos.harness.agent.wire import Kind

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Hits, Irreversible, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Terminate(Fault):
    """SIGTERM, and SIGKILL for what is still there after `grace`. With `target: {node: N}` it reaches the
    torchelastic agent, as a preemption notice reaches a container's first process; else the ranks themselves."""

    grace: Seconds = 30.0

    name: ClassVar[str] = "process.terminate"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd"})
    lethal: ClassVar[bool] = True
    hits: ClassVar[Hits] = "as_targeted"

    def changes(self, site: NodeSite) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a dead process can't be brought back; restarting it is the job's affair")

    def apply(self, site: NodeSite) -> None:
        site.signal(signal.SIGTERM)
        site.release()  # the grace period is the job's to use
        left = site.wait_for_exit(self.grace)
        site.emit(
            Kind.EFFECT, {"fault": site.fault, "effect": f"{len(left)} of {len(site.pids)} outlived the grace period"}
        )
        if left:
            site.signal(signal.SIGKILL)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGTERM), (self.grace, signal.SIGKILL)]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.evidence import gone

        return gone(record, fault)
