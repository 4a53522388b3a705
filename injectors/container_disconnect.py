"""container.disconnect: the engine takes a node off the network, and puts it back afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Disconnect(Fault):
    """The containers lose their interface. They get it back with the same address, under another name (eth1), so that a
    GLOO_SOCKET_IFNAME=eth0 of the job's own no longer fits."""

    name: ClassVar[str] = "container.disconnect"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"docker"})
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        from torchaos.harness.mechanics.containers.faults import changes

        return changes(site, "network")

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.containers.faults import do

        do(site, lambda hit: hit.client.disconnect_container_from_network(hit.id, hit.network[0]), "disconnect")

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.containers.faults import told

        return told(record, fault, "disconnect", "the engine says that node {nodes} was taken off the network")
