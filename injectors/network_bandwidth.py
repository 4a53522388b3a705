"""network.bandwidth: a link that is slower than it should be, as after it fell back to a lower rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, NodeSite, Probe, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Bandwidth(Fault):
    """What the target nodes send goes at `mbit` million bits a second at most (a token bucket)."""

    mbit: float = 10.0

    name: ClassVar[str] = "network.bandwidth"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"links", "tc"})
    hits: ClassVar[Hits] = "nodes"
    on_collectives: ClassVar[bool] = True

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        from torchaos.harness.mechanics.network.link import link_of
        from torchaos.harness.undo.network import Qdisc

        links = [link_of(live) for live in site.nodes]
        return [Qdisc(link.space.pid, link.space.start_ticks, link.device) for link in links]

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.network.link import link_of
        from torchaos.harness.undo.network import QDISC_MARK

        bits = round(self.mbit * 1e6)
        burst = max(3200, bits // 8 // 100)  # bytes: of 10 ms, and two packets at least
        tbf = ["tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", "200ms"]
        for link in map(link_of, site.nodes):
            link.space.run(["tc", "qdisc", "add", "dev", link.device, "root", "handle", QDISC_MARK, *tbf])

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        from torchaos.harness.mechanics.network.probes import limited

        return limited(site)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.network.evidence import counted

        return counted(record, fault, "overlimits")

    def asked(self) -> dict[str, float]:
        return {"rate_mbit": self.mbit}
