"""process.kill_agent: the torchelastic agent (torchrun itself) dies; its workers live on as orphans."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Hits, Irreversible, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class KillAgent(Fault):
    """SIGKILL to the agents of the target's nodes. Nobody restarts the workers, and nobody ends them."""

    name: ClassVar[str] = "process.kill_agent"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd"})
    lethal: ClassVar[bool] = True
    hits: ClassVar[Hits] = "agents"

    def changes(self, site: NodeSite) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a dead agent can't be brought back; starting the job again is the scheduler's affair")

    def apply(self, site: NodeSite) -> None:
        site.signal(signal.SIGKILL)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGKILL)]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.evidence import died

        return died(record, fault, -signal.SIGKILL)
