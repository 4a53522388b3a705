"""network.loss: a share of all packets between nodes is lost, as on a bad cable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, Probe, Site, Where
    from torchaos.harness.network.cut import Cut
    from torchaos.harness.record import Record


@dataclass(frozen=True)
class Loss(Fault):
    """Each packet between the target nodes and `peers` (by default all others) is lost with this probability, in both
    directions."""

    percent: float = 10.0
    peers: list[int] = field(default_factory=list)

    name: ClassVar[str] = "network.loss"
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
        return Cut(site.fault, inside, outside, percent=self.percent)
