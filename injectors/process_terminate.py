"""process.terminate: a notice, a grace period, then death, as for a spot preemption or a scheduler's cancel."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Kind, NodeSite, Record, Seconds
from torchaos.plugin.evidence import gone
from torchaos.plugin.families.ranks import DeathFault


@dataclass(frozen=True)
class Terminate(DeathFault):
    """Sends SIGTERM, and SIGKILL to the processes that are still alive after `grace` seconds. With `target: {node: N}`
    SIGTERM goes to the torchelastic agent, as a preemption notice goes to a container's first process; otherwise to the
    ranks."""

    grace: Seconds = 30.0

    name = "process.terminate"
    where = ("node",)
    needs = frozenset({"pidfd"})
    hits = "as_targeted"

    def apply(self, site: NodeSite) -> None:
        site.signal(signal.SIGTERM)
        site.release()  # the job decides how it uses the grace period
        left = site.wait_for_exit(self.grace)
        site.emit(
            Kind.EFFECT, {"fault": site.fault, "effect": f"{len(left)} of {len(site.pids)} outlived the grace period"}
        )
        if left:
            site.signal(signal.SIGKILL)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGTERM), (self.grace, signal.SIGKILL)]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return gone(record, fault)
