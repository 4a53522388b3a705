"""container.pause: a node's container is frozen by the engine, as under a snapshot, and goes on afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Pause(Fault):
    """The cgroup of the containers is frozen: no process of them runs, and none can notice that it was stopped."""

    name: ClassVar[str] = "container.pause"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"docker"})
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        from torchaos.harness.mechanics.containers.faults import changes

        return changes(site, "running")

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.containers.faults import do

        do(site, lambda hit: hit.client.pause(hit.id), "pause")

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.containers.faults import told

        return told(record, fault, "pause", "the engine says that the container of node {nodes} was paused")
