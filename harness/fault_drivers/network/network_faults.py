"""The base classes of faults of the links between nodes.

`PacketDropFault` drops packets (`network.partition`, `network.loss`). `ShapedFault` (`network.delay` and similar
faults) sends packets through netem if the kernel has it, otherwise through a packet queue."""

from __future__ import annotations

import shutil
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.base_classes import Fault
from torchaos.harness.fault_drivers.network import packet_queue
from torchaos.harness.fault_drivers.network.links import Helper, Link, PacketDrop, helper_of, link_of, sides
from torchaos.harness.fault_drivers.network.packet_queue import Shape
from torchaos.harness.fault_drivers.network.traffic_counters import (
    came,
    counted,
    drops,
    measured,
    meter_handle,
    slow_round_trips,
)
from torchaos.harness.interfaces import ChaosError, Evidence, Handle, Hits, NodeSite, Probe, Where
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.network_handles import IPTABLES, QDISC_MARK, Qdisc, QueueRule, mark_of


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
    """Changes how the packets that the target nodes send arrive at the others. To change both directions, the target
    must include both ends."""

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
        seen = slow_round_trips(site, self.least) if self.counter == "rtt_ms" else came(site, self.counter, self.words)
        return [*seen, *measured(site, self.asked(), jitter_ms=self.shape().get("jitter", 0.0))]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return counted(record, fault, self.counter, least=self.least)

    def _shapers(self, site: NodeSite) -> list[Shaper]:
        return [Shaper(site.fault, link_of(live), Shape(**self.shape())) for live in site.nodes]
