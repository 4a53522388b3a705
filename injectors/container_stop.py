"""container.stop: a node's container is told to end, and killed when it does not, as a scheduler ends one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.quantities import Seconds

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Hits, Irreversible, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Stop(Fault):
    """SIGTERM by the engine to the first process of the containers, and SIGKILL to all of it after `grace`."""

    grace: Seconds = 10.0

    name: ClassVar[str] = "container.stop"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"docker"})
    lethal: ClassVar[bool] = True
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: NodeSite) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a container that was stopped stays so; starting another is the scheduler's affair")

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.containers.faults import do

        do(site, lambda hit: hit.client.stop(hit.id, timeout=round(self.grace)), "kill", "die")

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.containers.faults import told

        return told(record, fault, "die", "the engine says that the container of node {nodes} has ended")
