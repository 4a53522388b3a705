"""The link between a node and the other nodes (`Link`), a helper process that keeps a fault on a link up, such as the
packet queue or a flapping link (`Helper`), the nftables table that drops packets between nodes (`PacketDrop`),
and the base classes of faults of links: `PacketDropFault` drops packets (`network.partition`, `network.loss`);
`ShapedFault` (`network.delay` and similar faults) sends packets through netem if the kernel has it, otherwise through a
packet queue.

The table is in the namespace of the switch. If the run does not own the switch, there is a table in each receiving
node. In a pod, whose agent can't change other pods, the table is in the pod itself, for the packets that the pod sends
and receives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.base_classes import Fault
from torchaos.harness.fault_drivers.network import packet_queue
from torchaos.harness.fault_drivers.network.packet_queue import Shape
from torchaos.harness.fault_drivers.network.traffic_counters import came, counted, drops, measured, meter_handle, slower
from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.interfaces import ChaosError, Evidence, Handle, Hits, LiveNode, NodeSite, Probe, Where
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.rollback.network_handles import IPTABLES, QDISC_MARK, NftTable, Qdisc, QueueRule, mark_of


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
        """Starts the helper in this network namespace; None: in the harness's own namespace. Returns the
        helper's first line of output, which reports that it is ready. If the command is `sh`, returns an empty text
        without waiting. Raises OSError."""
        process = self.open(namespace, command)
        assert process.stdout is not None
        return process.stdout.readline().decode().strip() if command[0] != "sh" else ""

    def open(self, namespace: NetworkNamespace | None, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts the helper like `start`, for a caller that reads its output itself. Raises OSError."""
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
    """The links of the target nodes, and the links of the nodes from which they are cut off: `peers`, or all other
    nodes if that is empty. Raises ChaosError if one of the two lists is empty."""
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
        """Loads the tables. Raises OSError."""
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


class PacketDropFault(Fault):
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
        """The values that the probe connection should measure while the fault is on."""
        return {"loss_percent": self.percent}

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [*self._packet_drop(site).handles, meter_handle(site)]

    def apply(self, site: NodeSite) -> None:
        self._packet_drop(site).apply()

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        asked = {} if self.ports or self.peers else self.asked()
        return [*drops(site, self._packet_drop(site)), *measured(site, asked, inward=self.direction == "in")]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return counted(record, fault, "dropped")

    def _packet_drop(self, site: NodeSite) -> PacketDrop:
        inside, outside = sides(site.nodes, site.cluster, self.peers)
        if self.direction == "in":
            inside, outside = outside, inside
        return PacketDrop(site.fault, inside, outside, self.direction == "both", self.ports, self.percent)


@dataclass(frozen=True)
class Shaper:
    """Applies one shape to the packets that a node sends. `apply` raises ChaosError, or OSError if a tool fails."""

    fault: str
    link: Link
    shape: Shape

    @property
    def _namespace(self) -> tuple[int, int]:
        return self.link.namespace.pid, self.link.namespace.start_ticks

    @property
    def _helper(self) -> Helper:
        return helper_of(self.fault, self.link)

    def handles(self) -> Sequence[Handle]:
        """The handles for both ways, netem and packet queue, because only `apply` finds out which of them works."""
        rule = QueueRule(*self._namespace, mark_of(self.fault))
        return [
            Qdisc(*self._namespace, self.link.device),
            self._helper.handle,
            *([rule] if shutil.which(IPTABLES[0]) else []),
        ]

    def apply(self) -> None:
        try:
            self.link.namespace.run(
                ["tc", "qdisc", "add", "dev", self.link.device, "root", "handle", QDISC_MARK, *netem(self.shape)]
            )
        except OSError as error:
            if "kind is unknown" not in str(error):
                raise
            self._by_queue()

    def _by_queue(self) -> None:
        number, namespace, chain = zlib.crc32(self.fault.encode()) & 0x7FFF, self.link.namespace, mark_of(self.fault)
        argv = [sys.executable, "-S", "-E", packet_queue.__file__, str(number), *map(str, astuple(self.shape))]
        answer = self._helper.start(namespace, argv)
        if answer != "ready":
            raise ChaosError(f"the packet queue did not start: {answer or 'it ended'}")
        namespace.run([*IPTABLES, "-N", chain])
        namespace.run([*IPTABLES, "-A", chain, "-m", "mark", "--mark", hex(packet_queue.MARK), "-j", "RETURN"])
        to_queue = ["-j", "NFQUEUE", "--queue-num", str(number), "--queue-bypass"]
        namespace.run([*IPTABLES, "-A", chain, "-o", self.link.device, *to_queue])
        namespace.run([*IPTABLES, "-A", "OUTPUT", "-j", chain])


def netem(shape: Shape) -> list[str]:
    """The shape as arguments of tc, see tc-netem(8)."""
    jitter = [f"{shape.jitter}ms"] if shape.jitter else []
    words = ["netem", "delay", f"{shape.delay}ms", *jitter]
    for name in ("duplicate", "reorder", "corrupt"):
        if percent := getattr(shape, name):
            words += [name, f"{percent}%"]
    return words


class ShapedFault(Fault):
    """Changes how all packets that the target nodes send arrive. For both directions, the target must include both
    ends."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    hits: ClassVar[Hits] = "nodes"
    needs: ClassVar[frozenset[str]] = frozenset({"links", "shaper", "tc", "ss"})
    on_collectives: ClassVar[bool] = True
    counter: ClassVar[
        str
    ]  # the counter of the receiving kernels that proves the fault; rtt_ms: the round trips of the job
    words: ClassVar[str] = ""  # the text of the evidence from that counter

    @property
    def least(self) -> float:
        """The value that the counter must reach."""
        return 1.0

    def shape(self) -> Mapping[str, float]:
        """The fields of a Shape (see packet_queue.py)."""
        raise NotImplementedError

    def asked(self) -> Mapping[str, float]:
        """The values that the probe connection should measure while the fault is on."""
        raise NotImplementedError

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [*(handle for shaper in self._shapers(site) for handle in shaper.handles()), meter_handle(site)]

    def apply(self, site: NodeSite) -> None:
        for shaper in self._shapers(site):
            shaper.apply()

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        seen = slower(site, self.least) if self.counter == "rtt_ms" else came(site, self.counter, self.words)
        return [*seen, *measured(site, self.asked(), jitter_ms=self.shape().get("jitter", 0.0))]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return counted(record, fault, self.counter, least=self.least)

    def _shapers(self, site: NodeSite) -> list[Shaper]:
        return [Shaper(site.fault, link_of(live), Shape(**self.shape())) for live in site.nodes]
