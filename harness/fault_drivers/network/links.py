"""The link between a node and the other nodes (`Link`), a helper process that keeps a fault on a link up, such as the
packet queue or a flapping link (`Helper`), and the nftables table that drops packets between nodes (`PacketDrop`).

The table is in the namespace of the switch. If the run does not own the switch, there is a table in each receiving
node. In a pod, whose agent can't change other pods, the table is in the pod itself, for the packets that the pod sends
and receives."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.interfaces import ChaosError, LiveNode
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.rollback.network_handles import NftTable, mark_of


@dataclass(frozen=True)
class Link:
    """A node's link. `namespace` is the node's own network namespace, with the end `device` of the link. `switch` is
    the namespace in which all links meet, with the other end `port`. If the run does not own a switch, `switch` is the
    same as `namespace`. For another pod, only the address is known."""

    namespace: NetworkNamespace
    switch: NetworkNamespace
    device: str
    port: str
    address: str
    name: str
    names_file: str  # the node's /etc/hosts, with the names of the other nodes
    run_id: str


def link_of(live: LiveNode) -> Link:
    """The node's link. Raises ChaosError if the node has none: it is the machine itself, or was not made by the run."""
    link: Link | None = live.node.link
    if link is None:
        raise ChaosError(f"node {live.node.index} has no link that could be changed; write launcher: netns")
    return link


@dataclass(frozen=True)
class Helper:
    """A process with a mark of its own in its environment, whose undo is on disk before it starts. The mark begins with
    the run's id and differs from the mark of the job."""

    mark: str

    @property
    def handle(self) -> JobProcesses:
        return JobProcesses(self.mark)

    def start(self, namespace: NetworkNamespace | None, command: Sequence[str]) -> str:
        """Starts the helper in this network namespace; None: in the harness's own namespace. Returns the helper's first
        line of output, which reports that it is ready. If the command is `sh`, returns an empty text without waiting.
        Raises OSError if the helper does not start."""
        process = self.open(namespace, command)
        assert process.stdout is not None
        return process.stdout.readline().decode().strip() if command[0] != "sh" else ""

    def open(self, namespace: NetworkNamespace | None, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts the helper like `start`, for a caller that reads its output itself. Raises OSError if it does not
        start."""
        return subprocess.Popen(
            namespace.enter(command) if namespace else list(command), cwd="/", start_new_session=True,
            env={**os.environ, ENV_RUN_ID: self.mark},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def helper_of(fault: str, link: Link) -> Helper:
    """The helper process of a fault on the link of one node."""
    return Helper(f"{link.run_id}.{mark_of(fault)}.{link.name}")


def sides(
    nodes: Sequence[LiveNode], cluster: Sequence[LiveNode], peers: Sequence[int]
) -> tuple[list[Link], list[Link]]:
    """The links of the target nodes, and the links of the nodes from which they are cut off: those of `peers`; if
    `peers` is empty, of all other nodes. Raises ChaosError if one of the two lists is empty."""
    inside = {live.node.index for live in nodes}
    outside = [live for live in cluster if live.node.index not in inside]
    outside = [live for live in outside if not peers or live.node.index in peers]
    if not inside or not outside:
        raise ChaosError("there is no node on the other side; name another target, or other peers")
    return [link_of(live) for live in nodes], [link_of(live) for live in outside]


# The families of the table: in the namespace of the switch, in a receiving node, in a pod.
FAMILY_BRIDGE, FAMILY_NETDEV, FAMILY_INET = "bridge", "netdev", "inet"


@dataclass(frozen=True)
class PacketDrop:
    """Drops `percent` of the packets from `sources` to `sinks`, and in the other direction if `both` is set. `ports`:
    only TCP packets from or to these ports are dropped."""

    fault: str
    sources: Sequence[Link]
    sinks: Sequence[Link]
    both: bool = True
    ports: Sequence[int] = ()
    percent: float = 100.0

    @property
    def handles(self) -> list[NftTable]:
        family = FAMILY_INET if self._here else FAMILY_NETDEV if self._in_nodes else FAMILY_BRIDGE
        return [
            NftTable(namespace.pid, namespace.start_ticks, family, mark_of(self.fault)) for namespace in self.scripts()
        ]

    def apply(self) -> None:
        """Loads the tables. Raises OSError if nft fails."""
        for namespace, script in self.scripts().items():
            namespace.run(["nft", "-f", "-"], script)

    def scripts(self) -> dict[NetworkNamespace, str]:
        """The script for nft(8), for each namespace that gets a table."""
        ways = [(self.sources, self.sinks), *([(self.sinks, self.sources)] if self.both else [])]
        if self._here:
            chains: dict[str, list[str]] = {}
            for froms, tos in ways:
                hook, side, others = ("output", "daddr", tos) if self._here in froms else ("input", "saddr", froms)
                chains[hook] = [rule for way in _addresses(others, side) for rule in self._rules(way)]
            return {self._here.namespace: self._table(FAMILY_INET, chains)}
        if not self._in_nodes:
            rules = [
                rule for froms, tos in ways
                for rule in self._rules(f"iifname {_ports(froms)} oifname {_ports(tos)}")
            ]  # fmt: skip
            return {self.sources[0].switch: self._table(FAMILY_BRIDGE, {"forward": rules})}
        return {
            link.namespace: self._table(FAMILY_NETDEV, {f'ingress device "{link.device}"': self._ingress_rules(froms)})
            for froms, tos in ways for link in tos
        }  # fmt: skip

    @property
    def _in_nodes(self) -> bool:
        return self.sources[0].switch == self.sources[0].namespace

    @property
    def _here(self) -> Link | None:
        """The link of this pod. None if this process is not the agent of a pod."""
        return next((link for link in (*self.sources, *self.sinks) if link.namespace.is_here), None)

    def _table(self, family: str, chains: Mapping[str, Sequence[str]]) -> str:
        """The script of one table. `chains`: the rules of each hook."""
        head = f"table {family} {mark_of(self.fault)} {{\n counter seen {{ }}\n counter dropped {{ }}\n"
        parts = [
            f" chain links{number} {{\n  type filter hook {hook} priority 0; policy accept;\n{lines}\n }}\n"
            for number, (hook, lines) in enumerate((hook, "\n".join(rules)) for hook, rules in chains.items())
        ]
        return "".join((head, *parts, "}\n"))

    def _ingress_rules(self, froms: Sequence[Link]) -> list[str]:
        """The rules for a receiving node. If all packets are dropped, ARP requests are dropped, too; a node sends these
        when it no longer knows the hardware address of another node."""
        addresses = ", ".join(link.address for link in froms)
        asks = [] if self.ports or self.percent < 100 else [f"  arp saddr ip {{ {addresses} }} drop"]
        return [*asks, *self._rules(f"ip saddr {{ {addresses} }}")]

    def _rules(self, way: str) -> list[str]:
        """The rules for one direction. `way`: the condition that selects its packets. Only TCP packets are counted,
        because the ranks and agents of a job send each other only TCP."""
        some = f" numgen random mod 10000 < {round(self.percent * 100)}" if self.percent < 100 else ""
        ports = ", ".join(map(str, self.ports))
        if ports:
            return [
                f"  {way} tcp {side} {{ {ports} }} counter name seen{some} counter name dropped drop"
                for side in ("sport", "dport")
            ]
        tcp = f"  {way} meta l4proto tcp counter name seen{some} counter name dropped drop"
        others = f"  {way} meta l4proto != tcp{some} drop" if some else f"  {way} drop"
        return [tcp, others]


def counts(*handles: NftTable) -> dict[str, int]:
    """How many packets each counter of these tables has counted. Empty if the tables are gone."""
    totals: Counter[str] = Counter()
    for handle in handles:
        try:
            output = handle.namespace.run(["nft", "-j", "list", "counters", "table", handle.family, handle.table])
        except OSError:
            continue
        counters = [item["counter"] for item in json.loads(output)["nftables"] if "counter" in item]
        totals.update({counter["name"]: counter["packets"] for counter in counters})
    return dict(totals)


def _addresses(links: Sequence[Link], side: str) -> list[str]:
    """The nft conditions for the IP addresses of these links, one for each version of IP."""
    found = {
        "ip": [link for link in links if ":" not in link.address],
        "ip6": [link for link in links if ":" in link.address],
    }
    return [
        f"{version} {side} {{ {', '.join(link.address for link in some)} }}" for version, some in found.items() if some
    ]


def _ports(links: Sequence[Link]) -> str:
    return "{ " + ", ".join(f'"{link.port}"' for link in links) + " }"
