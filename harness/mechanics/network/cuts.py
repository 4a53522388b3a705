"""The base class of `network.partition` and `network.loss`: a cut between the target nodes and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.contracts import Evidence, Handle, Hits, NodeSite, Probe, Where
from torchaos.harness.mechanics.network.cut import Cut, sides
from torchaos.harness.mechanics.network.evidence import counted
from torchaos.harness.mechanics.network.metering import measured, meter_handle
from torchaos.harness.mechanics.network.probes import drops
from torchaos.harness.record.record import Record


class CutFault(Fault):
    """Drops packets between nodes. `direction` is relative to the target."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    hits: ClassVar[Hits] = "nodes"
    needs: ClassVar[frozenset[str]] = frozenset({"links", "nft"})
    on_collectives: ClassVar[bool] = True

    peers: Sequence[int]  # indices of nodes; empty: all others

    if TYPE_CHECKING:  # a parameter in some injectors, a constant in others

        @property
        def direction(self) -> str: ...  # both, out, in
        @property
        def ports(self) -> Sequence[int]: ...  # of TCP; empty: all packets of the link
        @property
        def percent(self) -> float: ...  # percent of the packets

    def asked(self) -> Mapping[str, float]:
        """The values that a probe connection should measure while the fault is on."""
        return {"loss_percent": self.percent}

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [*self._cut(site).handles, meter_handle(site)]

    def apply(self, site: NodeSite) -> None:
        self._cut(site).apply()

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        asked = {} if self.ports or self.peers else self.asked()
        return [*drops(site, self._cut(site)), *measured(site, asked, inward=self.direction == "in")]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return counted(record, fault, "dropped")

    def _cut(self, site: NodeSite) -> Cut:
        inside, outside = sides(site.nodes, site.cluster, self.peers)
        if self.direction == "in":
            inside, outside = outside, inside
        return Cut(site.fault, inside, outside, self.direction == "both", self.ports, self.percent)
