"""network.partition: nodes that no longer hear each other, as behind a broken switch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, Probe, Site, Where
    from torchaos.harness.network.cut import Cut
    from torchaos.harness.record import Record


@dataclass(frozen=True)
class Partition(Fault):
    """Cuts the target nodes off from `peers`, by default from all others. `direction`, as the target sees it: `out`
    drops what it sends. With `ports`, only TCP from or to these, such as the rendezvous store's."""

    peers: list[int] = field(default_factory=list)
    direction: Literal["both", "out", "in"] = "both"
    ports: list[int] = field(default_factory=list)

    name: ClassVar[str] = "network.partition"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"links", "nft"})
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: Site) -> Sequence[Handle]:
        return [self._cut(site).handle]

    def apply(self, site: Site) -> None:
        self._cut(site).apply()

    def probes(self, site: Site) -> Sequence[Probe]:
        from torchaos.harness.network.probes import drops

        return drops(site, self._cut(site))

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.network.evidence import counted

        return counted(record, fault, "dropped")

    def _cut(self, site: Site) -> Cut:
        from torchaos.harness.network.cut import Cut, sides

        inside, outside = sides(site.nodes, site.cluster, self.peers)
        if self.direction == "in":
            inside, outside = outside, inside
        return Cut(site.fault, inside, outside, self.direction == "both", self.ports)
