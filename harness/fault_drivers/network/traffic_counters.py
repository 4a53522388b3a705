"""Proofs that a network fault took effect. The network namespace of a node has only the job's TCP connections, so the
kernel's counters of that namespace show what the job felt. In addition, a probe connection measures the link while the
fault is on, to compare the requested with the measured values; it shows only how the probe's own packets were
treated."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from torchaos.harness.fault_drivers.network import udp_probe
from torchaos.harness.fault_drivers.network.links import Helper, Link, PacketDrop, counts, link_of
from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.interfaces import Emit, Evidence, Handle, NodeSite
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.network_handles import NftTable, mark_of

Counts = Mapping[str, float]

# Names for counters of /proc/net/snmp and /proc/net/netstat; see the kernel's
# Documentation/networking/snmp_counter.rst.
COUNTERS = {
    "resent": ("Tcp.RetransSegs",),
    "timeouts": ("TcpExt.TCPTimeouts",),
    "resets": ("Tcp.EstabResets",),
    "bad_checksums": ("Tcp.InCsumErrors",),
    "duplicates": ("TcpExt.TCPDSACKOldSent", "TcpExt.TCPDSACKOfoSent"),
    "out_of_order": ("TcpExt.TCPOFOQueue",),
}


def read(links: Iterable[Link]) -> dict[str, int]:
    """The sums of the TCP counters of these links' network namespaces. They count from the creation of each
    namespace."""
    totals = dict.fromkeys(COUNTERS, 0)
    for link in links:
        table = _table(link.namespace)
        for name, parts in COUNTERS.items():
            totals[name] += sum(table.get(part, 0) for part in parts)
    return totals


def _table(namespace: NetworkNamespace) -> dict[str, int]:
    values: dict[str, int] = {}
    with suppress(OSError):
        for name in ("snmp", "netstat"):
            with open(namespace.proc / "net" / name) as file:
                lines = file.read().splitlines()
            for keys, numbers in zip(lines[::2], lines[1::2], strict=False):
                group = keys.partition(":")[0]
                pairs = zip(keys.split()[1:], numbers.split()[1:], strict=False)
                values.update({f"{group}.{key}": int(number) for key, number in pairs})
    return values


def round_trips(link: Link, peers: Iterable[str] = ()) -> dict[str, float]:
    """The longest smoothed round trip in ms on the node's connections to other nodes, from TCP_INFO as shown by ss.
    Empty if there is none. In a pod, only connections to the addresses `peers` count, because the pod's network also
    has other connections."""
    ends = " or ".join(f"dst [{peer}]" if ":" in peer else f"dst {peer}" for peer in peers)
    only = [f"( {ends} )"] if link.namespace.is_here and ends else []
    try:
        output = link.namespace.run(["ss", "-tinHO", "state", "established", *only])
    except OSError:
        return {}
    others = [line for line in output.splitlines() if "127.0.0.1" not in line]
    trips = [float(number) for line in others for number in re.findall(r"\brtt:([\d.]+)/", line)]
    return {"rtt_ms": max(trips)} if trips else {}


@dataclass
class Watch:
    """A probe that emits `network.sample` events with the growth of the counters since the probe was made. `proof`
    returns a sentence if the counters prove the fault; the first such sentence is emitted as an effect. `more`:
    functions that return further counters."""

    fault: str
    links: Sequence[Link]
    proof: Callable[[Counts], str | None]
    more: Sequence[Callable[[], Counts]] = ()
    period_s: float = 0.1
    _before: Mapping[str, int] = field(default_factory=dict)
    _emitted: dict[str, float] = field(default_factory=dict)
    _emitted_s: float = 0.0
    _proved: bool = False

    def __post_init__(self) -> None:
        if self.links:
            self._before = self._before or read(self.links)

    def sample(self, emit: Emit) -> None:
        now = read(self.links) if self.links else {}
        counts: dict[str, float] = {name: now[name] - before for name, before in self._before.items()}
        for source in self.more:
            counts.update(source())
        sentence = None if self._proved else self.proof(counts)
        if sentence or (counts != self._emitted and time.monotonic() - self._emitted_s > 0.4):
            emit(Kind.NETWORK, {"fault": self.fault, "counts": counts})
            self._emitted, self._emitted_s = counts, time.monotonic()
        if sentence:
            self._proved = True
            emit(Kind.EFFECT, {"fault": self.fault, "effect": sentence, "proof": counts})


def at_least(name: str, least: float, words: str) -> Callable[[Counts], str | None]:
    """A proof (see `Watch`) for the case that the counter `name` has reached `least`. In `words`, {n} is replaced by
    the value of the counter."""
    return lambda counts: words.format(n=f"{counts[name]:g}") if counts.get(name, 0) >= least else None


def drops(site: NodeSite, packet_drop: PacketDrop) -> Sequence[Watch]:
    """A probe that counts the job's own packets that were dropped. The rules that drop them have counters."""
    proof = at_least("dropped", 1, "the first packet of the job was dropped ({n} by now)")
    return [Watch(site.fault, _links(site), proof, [partial(counts, *packet_drop.handles)])]


def resent(site: NodeSite) -> Sequence[Watch]:
    return [Watch(site.fault, _links(site), at_least("resent", 1, "the job sent {n} segments again"))]


def came(site: NodeSite, name: str, words: str) -> Sequence[Watch]:
    """A probe that counts segments that arrived at the nodes, by the kernel counter `name`."""
    return [Watch(site.fault, _links(site), at_least(name, 1, words))]


def slow_round_trips(site: NodeSite, least_ms: float) -> Sequence[Watch]:
    """A probe that measures the round trips on the connections of each target node."""
    proof = at_least("rtt_ms", least_ms, "the round trip on the job's connections is {n} ms")
    links, every = [link_of(live) for live in site.nodes], _links(site)
    return [Watch(site.fault, every, proof, [partial(_longest, links, every)], period_s=0.25)]


def limited(site: NodeSite) -> Sequence[Watch]:
    """A probe that counts the packets that waited for a rate limit, and measures the rate of those that passed."""
    proof = at_least("overlimits", 1, "{n} packets of the job had to wait for the rate limit")
    links = [link_of(live) for live in site.nodes]
    return [Watch(site.fault, _links(site), proof, [_Limiter(links)], period_s=0.25)]


def _links(site: NodeSite) -> list[Link]:
    return [link_of(live) for live in site.cluster]


def _longest(links: Sequence[Link], every: Sequence[Link]) -> Counts:
    peers = {link: [other.address for other in every if other != link] for link in links}
    times = [trips["rtt_ms"] for link in links if (trips := round_trips(link, peers[link]))]
    return {"rtt_ms": max(times)} if times else {}


class _Limiter:
    """The counters of the token buckets, as a function. The rate is the job's highest rate between two samples while
    packets were waiting: when no packet waits, the job may use less than the whole rate."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._last: dict[str, tuple[float, int, bool]] = {}  # by link: time, bytes sent, whether packets wait
        self._rates: list[float] = []  # Mbit/s

    def __call__(self) -> Counts:
        total = 0
        for link in self._links:
            try:
                shown = json.loads(link.namespace.run(["tc", "-s", "-j", "qdisc", "show", "dev", link.device]))
            except OSError:
                continue
            for qdisc in (qdisc for qdisc in shown if qdisc.get("kind") == "tbf"):
                total += qdisc.get("overlimits", 0)
                now = time.monotonic(), qdisc.get("bytes", 0), qdisc.get("backlog", 0) > 0
                before = self._last.get(link.name)
                if before and before[2] and now[2]:
                    self._rates.append(8e-6 * (now[1] - before[1]) / (now[0] - before[0]))
                self._last[link.name] = now
        return {"overlimits": total, **({"rate_mbit": round(max(self._rates), 3)} if self._rates else {})}


def refusals(site: NodeSite, tables: Sequence[NftTable]) -> Sequence[Watch]:
    """A probe that counts the connections that the rules of these tables refused."""
    proof = at_least("refused", 1, "{n} connections of the job were refused")
    return [Watch(site.fault, _links(site), proof, [partial(_refused, tables)])]


def _refused(tables: Sequence[NftTable]) -> Counts:
    return {"refused": sum(counts(table).get("refused", 0) for table in tables)}


def counted(record: Record, fault: str, *names: str, least: float = 1) -> Evidence | None:
    """Evidence that one of the counters `names` grew by at least `least` while the fault was on."""
    for event in record.of_fault(fault, Kind.NETWORK):
        for name in names:
            if (number := event.data["counts"].get(name, 0)) >= least:
                return Evidence.of(_WORDS.get(name, name + ": {n}").format(n=f"{number:g}"), event)
    return None


_WORDS = {
    "dropped": "{n} TCP packets of the job were dropped between the nodes",
    "resent": "the job's connections sent {n} segments again",
    "timeouts": "{n} retransmission timers of the job's connections ran out",
    "resets": "{n} established connections of the job were reset",
    "bad_checksums": "{n} segments of the job came with a bad checksum",
    "duplicates": "{n} segments of the job came twice",
    "out_of_order": "{n} segments of the job came out of order",
    "rtt_ms": "the round trip on the job's connections rose to {n} ms",
    "overlimits": "{n} packets of the job had to wait for the rate limit",
    "refused": "{n} connections of the job were refused",
}


def late(record: Record, fault: str, seconds: float) -> Evidence | None:
    """Evidence that no rank finished a step for at least `seconds` while the fault was on."""
    hits = [event.mono_s for event in record.of_fault(fault, Kind.APPLIED)]
    if not hits:
        return None
    steps = record.steps_made.in_order_of_time.after(hits[0])
    first = steps.event(0) if len(steps) else None
    if first is None or first.mono_s - hits[0] < seconds:
        return None
    return Evidence.of(f"no rank finished a step for {first.mono_s - hits[0]:.1f} s", first)


def logged(record: Record, fault: str, cause: str, words: str, naming: Sequence[str] = ("",)) -> Evidence | None:
    """Evidence that the job's log, while the fault was on, had a line with this cause (see
    monitoring/probes/job_log.py) that contains one of the texts `naming`."""
    on = [event.mono_s for event in record.of_fault(fault, Kind.APPLYING)]
    off = [event.mono_s for event in record.of_fault(fault, Kind.ROLLED_BACK)]
    for event in record.of_kind(Kind.LOG_CAUSE):
        is_on = on and on[0] <= event.mono_s <= (off[0] + 1.0 if off else float("inf"))
        if is_on and event.data["cause"] == cause and any(name in event.data["line"] for name in naming):
            return Evidence.of(f"{words}: {event.data['line']}", event)
    return None


SETTLE_S = 0.3  # seconds after sending, in addition to the requested delay, in which a datagram may arrive


def meter_handle(site: NodeSite) -> Handle:
    """The handle of the process that `measured` starts."""
    return _helper(site).handle


def measured(
    site: NodeSite, asked: Mapping[str, float], inward: bool = False, jitter_ms: float = 0.0
) -> Sequence[Measuring]:
    """Probes that measure the link from the first target node to the first other node; with `inward`, in the other
    direction. With `jitter_ms`, the gaps between datagrams are long enough that none waits for an earlier one. Empty if
    no requested value can be measured, or if this process can't enter the network of the other node."""
    if not asked:
        return ()
    inside = [link_of(live) for live in site.nodes]
    targets = {live.node.index for live in site.nodes}
    outside = [link_of(live) for live in site.cluster if live.node.index not in targets] or inside[1:]
    if not outside or not outside[0].namespace.alive():
        return ()
    ends = (outside[0], inside[0]) if inward else (inside[0], outside[0])
    settle_s = SETTLE_S + 2e-3 * asked.get("delay_ms", 0.0)
    return [
        Measuring(
            site.fault, dict(asked), _start(_helper(site), *ends, settle_s, max(udp_probe.GAP_S, 2.2e-3 * jitter_ms))
        )
    ]


@dataclass
class Measuring:
    """A probe that emits the measured values of the link, as `network.sample` events. `asked`: the requested values."""

    fault: str
    asked: Mapping[str, float]
    process: subprocess.Popen[bytes]
    period_s: float = 0.25
    _rest: bytes = field(default=b"")

    def sample(self, emit: Emit) -> None:
        assert self.process.stdout is not None
        try:
            self._rest += os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        *lines, self._rest = self._rest.split(b"\n")
        if lines:
            printed = json.loads(lines[-1])
            values = {name: printed[name] for name in self.asked if name in printed}
            emit(Kind.NETWORK, {"fault": self.fault, "counts": {}, "measured": values, "datagrams": printed["sent"]})


def _helper(site: NodeSite) -> Helper:
    return Helper(f"{link_of(site.nodes[0]).run_id}.{mark_of(site.fault)}.meter")


def _start(helper: Helper, sender: Link, receiver: Link, settle_s: float, gap_s: float) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-S", "-E", udp_probe.__file__, str(receiver.namespace.pid)]
    argv += [sender.address, receiver.address, str(settle_s), str(gap_s)]
    process = helper.open(sender.namespace, argv)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process
