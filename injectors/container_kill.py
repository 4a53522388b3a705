"""container.kill: a node's container dies at once, as when somebody removes it by force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Hits, Irreversible, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL by the engine to the containers of the target nodes: their processes and their network go with them."""

    name: ClassVar[str] = "container.kill"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"docker"})
    lethal: ClassVar[bool] = True
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: NodeSite) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a container that was killed stays so; starting another is the scheduler's affair")

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.containers.faults import do

        do(site, lambda hit: hit.client.kill(hit.id), "die")

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.containers.faults import told

        return told(record, fault, "die", "the engine says that the container of node {nodes} died")
