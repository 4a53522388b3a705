"""The base classes of faults of the links between nodes, and of faults of whole nodes.

`CutFault` drops packets (`network.partition`, `network.loss`). `ShapedFault` (`network.delay` and similar faults) sends
packets through netem if the kernel has it, otherwise through a packet queue.

Faults of whole nodes hit all of the job's processes on a node: torchrun, the ranks, and their child processes."""

from __future__ import annotations

import shutil
import signal
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.base_classes import Fault
from torchaos.harness.fault_drivers.network import cpu_throttle, packet_queue
from torchaos.harness.fault_drivers.network.links import Cut, Helper, Link, helper_of, link_of, sides
from torchaos.harness.fault_drivers.network.packet_queue import Shape
from torchaos.harness.fault_drivers.network.traffic_counters import came, counted, drops, measured, meter_handle, slower
from torchaos.harness.host import processes
from torchaos.harness.interfaces import (
    ChaosError,
    Evidence,
    Handle,
    Hits,
    Irreversible,
    LiveNode,
    NodeSite,
    Probe,
    Where,
)
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.handles import Process
from torchaos.harness.rollback.network_handles import IPTABLES, QDISC_MARK, Qdisc, QueueRule, mark_of


class CutFault(Fault):
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
        return [*self._cut(site).handles, meter_handle(site)]

    def apply(self, site: NodeSite) -> None:
        self._cut(site).apply()

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        asked = {} if self.ports or self.peers else self.asked()
        return [*drops(site, self._cut(site)), *measured(site, asked, inward=self.direction == "in")]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return counted(record, fault, "dropped")

    def _cut(self, site: NodeSite) -> Cut:
        inside, outside = sides(site.nodes, site.cluster, self.peers)
        if self.direction == "in":
            inside, outside = outside, inside
        return Cut(site.fault, inside, outside, self.direction == "both", self.ports, self.percent)


@dataclass(frozen=True)
class Shaper:
    """Applies one shape to the packets that a node sends. `apply` raises ChaosError, or OSError if a tool fails."""

    fault: str
    link: Link
    shape: Shape

    @property
    def _space(self) -> tuple[int, int]:
        return self.link.space.pid, self.link.space.start_ticks

    @property
    def _helper(self) -> Helper:
        return helper_of(self.fault, self.link)

    def handles(self) -> Sequence[Handle]:
        """The handles for both ways, netem and packet queue, because only `apply` finds out which of them works."""
        rule = QueueRule(*self._space, mark_of(self.fault))
        return [
            Qdisc(*self._space, self.link.device),
            self._helper.handle,
            *([rule] if shutil.which(IPTABLES[0]) else []),
        ]

    def apply(self) -> None:
        try:
            self.link.space.run(
                ["tc", "qdisc", "add", "dev", self.link.device, "root", "handle", QDISC_MARK, *netem(self.shape)]
            )
        except OSError as error:
            if "kind is unknown" not in str(error):
                raise
            self._by_queue()

    def _by_queue(self) -> None:
        number, space, chain = zlib.crc32(self.fault.encode()) & 0x7FFF, self.link.space, mark_of(self.fault)
        argv = [sys.executable, "-S", "-E", packet_queue.__file__, str(number), *map(str, astuple(self.shape))]
        answer = self._helper.start(space, argv)
        if answer != "ready":
            raise ChaosError(f"the packet queue did not start: {answer or 'it ended'}")
        space.run([*IPTABLES, "-N", chain])
        space.run([*IPTABLES, "-A", chain, "-m", "mark", "--mark", hex(packet_queue.MARK), "-j", "RETURN"])
        to_queue = ["-j", "NFQUEUE", "--queue-num", str(number), "--queue-bypass"]
        space.run([*IPTABLES, "-A", chain, "-o", self.link.device, *to_queue])
        space.run([*IPTABLES, "-A", "OUTPUT", "-j", chain])


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


KILL_S = 30.0  # seconds


class NodeDeath(Fault):
    """The base class of faults that kill all of the job's processes on nodes."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd", "proc"})
    lethal: ClassVar[bool] = True
    hits: ClassVar[Hits] = "nodes"
    irreversible: ClassVar[str] = "torchaos can't bring back a dead node; the scheduler has to"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible(self.irreversible)


def processes_of(nodes: Iterable[LiveNode]) -> dict[int, int]:
    """The job's processes on these nodes: start time by pid. Raises ChaosError if a node has no such process."""
    targets: dict[int, int] = {}
    for live in nodes:
        here = live.processes()
        if not here:
            raise ChaosError(f"no process of the job is on node {live.node.index} now")
        targets.update(here)
    return targets


def kill(site: NodeSite) -> None:
    """Sends SIGKILL to all of the job's processes on the nodes, again and again until none is left. Raises ChaosError
    if there were none, or if some can't be killed."""
    killed: dict[int, int] = processes_of(site.nodes)
    deadline = time.monotonic() + KILL_S
    left = found = killed
    while found and time.monotonic() < deadline:
        left = dict.fromkeys(processes.kill(found, deadline), 0)
        found = {pid: ticks for live in site.nodes for pid, ticks in live.processes().items()}
        killed.update(found)
    tell(site, killed, "killed")
    if left:
        raise ChaosError(f"processes of the node can't be killed: {sorted(left)}")


def heads(targets: Mapping[int, int]) -> dict[int, int]:
    """The processes in `targets` whose parent is not in `targets`: torchrun, or a wrapper around it."""
    stats = {pid: processes.stat(pid) for pid in targets}
    return {pid: targets[pid] for pid, stat in stats.items() if stat and stat.parent not in targets}


def tell(site: NodeSite, targets: Iterable[int], done: str) -> None:
    names = ", ".join(str(live.node.index) for live in site.nodes)
    pids = sorted(targets)
    many = "1 process" if len(pids) == 1 else f"{len(pids)} processes"
    effect = f"{many} of node {names} {'was' if len(pids) == 1 else 'were'} {done}"
    site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect, "pids": pids})


def resumed(site: NodeSite) -> list[Handle]:
    """The handles that continue (SIGCONT) all processes of the job that are on the nodes now."""
    return [Process(pid, ticks, "resume", processes.boot_id()) for pid, ticks in processes_of(site.nodes).items()]


def slow_helper(site: NodeSite) -> Helper:
    return Helper(f"{site.nodes[0].run_id}.{mark_of(site.fault)}")


def slow_down(site: NodeSite, share: float) -> None:
    """Lets all processes of the job on the nodes run only for this share of the time. Raises ChaosError if the helper
    process does not start."""
    targets = processes_of(site.nodes)
    argv = [sys.executable, "-S", "-E", cpu_throttle.__file__, str(share), *(f"{p}:{t}" for p, t in targets.items())]
    answer = slow_helper(site).start(None, argv)
    if answer != "ready":
        raise ChaosError(f"the nodes could not be slowed down: {answer or 'the helper ended'}")
    tell(site, targets, f"slowed down to {100 * share:g} % of the time")


_EXITS = (Kind.RANK_EXITED, Kind.NODE_EXITED, Kind.JOB_EXITED)


def ended(record: Record, fault: str) -> Evidence | None:
    """Evidence that a process that the fault killed has exited by SIGKILL. It is a rank or the command of a node."""
    exits = (event for event in record.of_kind(*_EXITS) if event.data.get("exit_code") == -signal.SIGKILL)
    return _first(record, fault, exits, "pid {} ended with exit code -9")


def left(record: Record, fault: str) -> Evidence | None:
    """Evidence that a process that the fault ended has exited. The exit code does not matter, because a process that
    ends normally chooses it."""
    return _first(record, fault, record.of_kind(*_EXITS), "pid {} left")


def stopped(record: Record, fault: str) -> Evidence | None:
    """Evidence that the process probe saw a rank of the node in state T (stopped)."""
    states = (event for event in record.of_kind(Kind.RANK_STATE) if event.data["state"] == "T")
    return _first(record, fault, states, "the kernel showed pid {} as stopped")


def _first(record: Record, fault: str, events: Iterable[Event], words: str) -> Evidence | None:
    """Evidence from the first of these events that is about a process that the fault hit."""
    pids = {pid for event in record.of_fault(fault, Kind.EFFECT) for pid in event.data.get("pids", ())}
    seen = next((event for event in events if event.data["pid"] in pids), None)
    return Evidence.of(words.format(seen.data["pid"]), seen) if seen else None
