"""The kernel's counters of a job's own connections while a fault is on.

A node's network namespace has only the job's TCP connections, so the counters of the namespace are evidence."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import Emit
from torchaos.harness.machine.netspace import Space
from torchaos.harness.mechanics.network.link import Link

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
    """The sum of the TCP counters of these links' network namespaces, counted from the creation of each namespace."""
    totals = dict.fromkeys(COUNTERS, 0)
    for link in links:
        table = _table(link.space)
        for name, parts in COUNTERS.items():
            totals[name] += sum(table.get(part, 0) for part in parts)
    return totals


def _table(space: Space) -> dict[str, int]:
    values: dict[str, int] = {}
    with suppress(OSError):
        for name in ("snmp", "netstat"):
            with open(space.proc / "net" / name) as file:
                lines = file.read().splitlines()
            for keys, numbers in zip(lines[::2], lines[1::2], strict=False):
                group = keys.partition(":")[0]
                pairs = zip(keys.split()[1:], numbers.split()[1:], strict=False)
                values.update({f"{group}.{key}": int(number) for key, number in pairs})
    return values


def round_trips(link: Link, peers: Iterable[str] = ()) -> dict[str, float]:
    """The longest smoothed round trip in ms on the node's connections to others, from TCP_INFO by ss. In a pod, only
    connections to the addresses `peers` count: its network also has connections that are not between the nodes."""
    ends = " or ".join(f"dst [{peer}]" if ":" in peer else f"dst {peer}" for peer in peers)
    only = [f"( {ends} )"] if link.space.is_here and ends else []
    try:
        output = link.space.run(["ss", "-tinHO", "state", "established", *only])
    except OSError:
        return {}
    others = [line for line in output.splitlines() if "127.0.0.1" not in line]
    trips = [float(number) for line in others for number in re.findall(r"\brtt:([\d.]+)/", line)]
    return {"rtt_ms": max(trips)} if trips else {}


@dataclass
class Watch:
    """A probe that emits `network.sample` events with the changes of the counters since the probe was made. `proof`
    returns a sentence if the counters prove the fault. The first such sentence is emitted as an effect."""

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
    """A proof (see `Watch`) that holds when the counter `name` has reached `least`. In `words`, {n} is replaced by the
    counter's value."""
    return lambda counts: words.format(n=f"{counts[name]:g}") if counts.get(name, 0) >= least else None
