"""Connections between nodes.

- network.refuse: new ones to the node are refused, as if the port is closed; open connections continue
- network.reset: open ones break at once, as when a restarted firewall no longer knows them"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchaos.plugin import Evidence, Fault, Handle, Irreversible, Kind, NodeSite, Probe, Record
from torchaos.plugin.families.network import Link, counted, link_of, mark_of, read, refusals, sides
from torchaos.plugin.undo import NftTable


@dataclass(frozen=True)
class Refuse(Fault):
    """Refuses new connections to the target nodes (with `ports`, to these ports), as if no program listens there."""

    ports: list[int] = field(default_factory=list)

    name = "network.refuse"
    where = ("node",)
    needs = frozenset({"links", "nft"})
    hits = "nodes"

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [_table(site.fault, link) for link in self._links(site)]

    def apply(self, site: NodeSite) -> None:
        ports = f"tcp dport {{ {', '.join(map(str, self.ports))} }} " if self.ports else ""
        for link in self._links(site):
            table = _table(site.fault, link)
            link.namespace.run(
                ["nft", "-f", "-"],
                f"table inet {table.table} {{\n counter refused {{ }}\n chain new {{\n"
                "  type filter hook input priority 0; policy accept;\n"
                f"  iifname \"{link.device}\" {ports}tcp flags & (syn|ack) == syn counter name refused "
                "reject with tcp reset\n }\n}\n",
            )  # fmt: skip

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return refusals(site, [_table(site.fault, link) for link in self._links(site)])

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return counted(record, fault, "refused")

    def _links(self, site: NodeSite) -> list[Link]:
        return [link_of(live) for live in site.nodes]


def _table(fault: str, link: Link) -> NftTable:
    return NftTable(link.namespace.pid, link.namespace.start_ticks, "inet", mark_of(fault))


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
