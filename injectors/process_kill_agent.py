"""process.kill_agent: the torchelastic agent (torchrun itself) dies; its workers continue without a parent."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import NodeSite
from torchaos.plugin.families.ranks import DeathFault


@dataclass(frozen=True)
class KillAgent(DeathFault):
    """Sends SIGKILL to the torchelastic agents on the target's nodes. The workers stay alive, and no agent is left to
    restart or end them."""

    name = "process.kill_agent"
    where = ("node",)
    needs = frozenset({"pidfd"})
    hits = "agents"
    irreversible = "a dead agent can't be brought back; the scheduler has to start the job again"

    def apply(self, site: NodeSite) -> None:
        site.signal(signal.SIGKILL)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGKILL)]
