"""Dropping what goes between nodes, in the switch: an nftables table of our own, put in place in one transaction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.harness.contracts import LiveNode
from torchaos.harness.network.link import Link, link_of
from torchaos.harness.undo.network import NftTable, mark_of
from torchaos.harness.undo.space import Space

FAMILY = "bridge"


@dataclass(frozen=True)
class Cut:
    """Drops `percent` of what `sources` send to `sinks`. With `ports`, of TCP from or to these alone."""

    fault: str
    sources: Sequence[Link]
    sinks: Sequence[Link]
    both: bool = True
    ports: Sequence[int] = ()
    percent: float = 100.0

    @property
    def switch(self) -> Space:
        return self.sources[0].switch

    @property
    def handle(self) -> NftTable:
        return NftTable(self.switch.pid, self.switch.start_ticks, FAMILY, mark_of(self.fault))

    def apply(self) -> None:
        """Raises OSError."""
        self.switch.run(["nft", "-f", "-"], self.script())

    def script(self) -> str:
        ways = [(self.sources, self.sinks), *([(self.sinks, self.sources)] if self.both else [])]
        rules = "\n".join(rule for froms, tos in ways for rule in self._rules(froms, tos))
        return (
            f"table {FAMILY} {mark_of(self.fault)} {{\n counter seen {{ }}\n counter dropped {{ }}\n"
            f" chain links {{\n  type filter hook forward priority 0; policy accept;\n{rules}\n }}\n}}\n"
        )

    def _rules(self, froms: Sequence[Link], tos: Sequence[Link]) -> list[str]:
        """What is counted is TCP, in which all that a job's ranks and agents say to each other goes."""
        way = f"iifname {_set(froms)} oifname {_set(tos)}"
        some = f" numgen random mod 10000 < {round(self.percent * 100)}" if self.percent < 100 else ""
        ports = ", ".join(map(str, self.ports))
        if ports:
            return [
                f"  {way} tcp {side} {{ {ports} }} counter name seen{some} counter name dropped drop"
                for side in ("sport", "dport")
            ]
        tcp = f"  {way} ip protocol tcp counter name seen{some} counter name dropped drop"
        others = f"  {way} meta l4proto != tcp{some} drop" if some else f"  {way} drop"
        return [tcp, others]


def counts(handle: NftTable) -> dict[str, int]:
    """The packets that each counter of a table has counted; empty when the table is gone."""
    try:
        said = handle.space.run(["nft", "-j", "list", "counters", "table", handle.family, handle.table])
    except OSError:
        return {}
    return {
        one["counter"]["name"]: one["counter"]["packets"] for one in json.loads(said)["nftables"] if "counter" in one
    }


def sides(
    nodes: Sequence[LiveNode], cluster: Sequence[LiveNode], peers: Sequence[int]
) -> tuple[list[Link], list[Link]]:
    """The links of the target nodes, and of those that they are cut off from: `peers`, or all others. Raises ChaosError
    where there is nobody on one side."""
    from torchaos.harness.contracts import ChaosError

    inside = {live.node.index for live in nodes}
    outside = [live for live in cluster if live.node.index not in inside]
    outside = [live for live in outside if not peers or live.node.index in peers]
    if not inside or not outside:
        raise ChaosError("there is no node on the other side; name another target, or other peers")
    return [link_of(live) for live in nodes], [link_of(live) for live in outside]


def _set(links: Sequence[Link]) -> str:
    return "{ " + ", ".join(f'"{link.port}"' for link in links) + " }"
