"""network.reset: established connections break at once, as when a firewall forgets them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.wire import Kind

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Hits, Irreversible, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Reset(Fault):
    """Ends the target nodes' TCP connections with `peers`, by default with all others, and with `ports` only those from
    or to these. Both ends see an error."""

    peers: list[int] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    name: ClassVar[str] = "network.reset"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"links", "ss"})
    hits: ClassVar[Hits] = "nodes"
    on_collectives: ClassVar[bool] = True

    def changes(self, site: NodeSite) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a connection that was reset stays so; opening another one is the job's affair")

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.network.cut import sides
        from torchaos.harness.mechanics.network.sampling import read

        inside, outside = sides(site.nodes, site.cluster, self.peers)
        others = " or ".join(f"dst {link.address}" for link in outside)
        ports = " or ".join(f"sport = :{port} or dport = :{port}" for port in self.ports)
        which = f"( {others} )" + (f" and ( {ports} )" if ports else "")
        before = read([*inside, *outside])["resets"]
        for link in inside:
            link.space.run(["ss", "-K", "-tnHO", "state", "established", which])
        counts = {"resets": read([*inside, *outside])["resets"] - before}
        site.emit(Kind.NETWORK, {"fault": site.fault, "counts": counts})
        effect = f"{counts['resets']} established connections of the job were reset"
        site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect})

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.network.evidence import counted

        return counted(record, fault, "resets")
