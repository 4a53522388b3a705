"""process.kill_agent: the torchelastic agent (torchrun itself) dies; its workers continue without a parent."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import DeathFault, NodeSite


@dataclass(frozen=True)
class KillAgent(DeathFault):
    """Sends SIGKILL to the agents of the target's nodes. No process restarts the workers, and no process ends them."""

    name = "process.kill_agent"
    where = ("node",)
    needs = frozenset({"pidfd"})
    hits = "agents"
    irreversible = "a dead agent can't be brought back; starting the job again is the scheduler's affair"

    def apply(self, site: NodeSite) -> None:
        site.signal(signal.SIGKILL)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGKILL)]
