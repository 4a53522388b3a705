"""network.reset: open connections break at once, as when a restarted firewall no longer knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchaos.plugin import Evidence, Fault, Irreversible, Kind, NodeSite, Record
from torchaos.plugin.families.network import counted, read, sides


@dataclass(frozen=True)
class Reset(Fault):
    """Ends the target nodes' TCP connections with `peers` (by default all other nodes). With `ports`, only connections
    from or to these ports end. Both ends see an error."""

    peers: list[int] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    name = "network.reset"
    where = ("node",)
    needs = frozenset({"links", "ss"})
    hits = "nodes"
    on_collectives = True

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("a connection that was reset can't be restored; the job has to open a new one")

    def apply(self, site: NodeSite) -> None:
        inside, outside = sides(site.nodes, site.cluster, self.peers)
        others = " or ".join(f"dst {link.address}" for link in outside)
        ports = " or ".join(f"sport = :{port} or dport = :{port}" for port in self.ports)
        which = f"( {others} )" + (f" and ( {ports} )" if ports else "")
        before = read([*inside, *outside])["resets"]
        for link in inside:
            link.namespace.run(["ss", "-K", "-tnHO", "state", "established", which])
        counts = {"resets": read([*inside, *outside])["resets"] - before}
        site.emit(Kind.NETWORK, {"fault": site.fault, "counts": counts})
        effect = f"{counts['resets']} established connections of the job were reset"
        site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect})

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return counted(record, fault, "resets")
