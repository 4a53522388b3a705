"""network.bandwidth: a link is slower than it should be, for example after it fell back to a lower rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Handle, NodeSite, Probe, Record
from torchaos.plugin.families.network import QDISC_MARK, counted, limited, link_of
from torchaos.plugin.undo import Qdisc


@dataclass(frozen=True)
class Bandwidth(Fault):
    """The target nodes send at most `mbit` million bits per second (a token bucket)."""

    mbit: float = 10.0

    name = "network.bandwidth"
    where = ("node",)
    needs = frozenset({"links", "tc"})
    hits = "nodes"
    on_collectives = True

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        links = [link_of(live) for live in site.nodes]
        return [Qdisc(link.namespace.pid, link.namespace.start_ticks, link.device) for link in links]

    def apply(self, site: NodeSite) -> None:
        bits = round(self.mbit * 1e6)
        burst = max(3200, bits // 8 // 100)  # bytes: as many as 10 ms allow, and at least two packets
        tbf = ["tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", "200ms"]
        for link in map(link_of, site.nodes):
            link.namespace.run(["tc", "qdisc", "add", "dev", link.device, "root", "handle", QDISC_MARK, *tbf])

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return limited(site)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return counted(record, fault, "overlimits")

    def asked(self) -> dict[str, float]:
        return {"rate_mbit": self.mbit}
