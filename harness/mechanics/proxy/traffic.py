"""Measures the job's traffic through a proxy, from the kernel's data about the proxy's connections (TCP_INFO, by ss).

Bytes that the proxy has got from one side and not sent to the other are held back by it. If all bytes that it had got
at one look have still not been sent at a later look, then some were held for the time between. This bound is too low,
and never too high."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torchaos.harness.mechanics.proxy.server import Endpoint

_INFO = re.compile(r"\b(bytes_received|bytes_sent|data_segs_in|data_segs_out):(\d+)")
_LOOK_S = 0.3  # when bytes are held, look again and again for so long
WAYS = {"upstream": "sent", "downstream": "got"}  # as the job sees it


@dataclass(frozen=True)
class _Look:
    """The open connections of a proxy at one time, by peer and own address: the kernel's counters. A connection is open
    until the proxy has closed it, or the endpoint."""

    begun_s: float  # CLOCK_MONOTONIC
    ended_s: float
    job: Mapping[str, Mapping[str, int]]
    upstream: Mapping[str, Mapping[str, int]]

    def bytes_of(self, way: str) -> tuple[int, int]:
        """Bytes that the proxy has got for this way, and sent on."""
        into, out = (self.job, self.upstream) if way == "sent" else (self.upstream, self.job)
        return sum(one["bytes_received"] for one in into.values()), sum(one["bytes_sent"] for one in out.values())


@dataclass(frozen=True)
class _Mark:
    look: _Look
    got: int
    sent: int


class Traffic:
    """Each call returns the counts since this object was made: bytes that the job sent and got, `unanswered` (bytes
    sent, if none came back), connections seen, and connections that `ended`. For each way (`sent` and `got` by the
    job): `held_*_ms`, the longest time for which bytes were surely held back, and `held_*_kbs`, the rate at which bytes
    passed in that time; `pieces_*` and `piece_*_bytes`, how often the proxy divided what came, and the mean size of its
    pieces. `half_closed_ms`: how long a connection of the job was open after the endpoint had closed it. Only the job
    knows the proxy's port, so all connections are the job's. A connection that begins and ends between two calls is not
    seen."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        look = _look(endpoint)
        self._first, self._last = (look.job, look.upstream), (dict(look.job), dict(look.upstream))
        self._ended = 0
        self._before = look
        self._marks: dict[str, _Mark] = {}
        self._held: dict[str, tuple[float, float]] = {}  # by way: seconds, bytes per second
        self._half_closed_since_s: float | None = None
        self._half_closed_s = 0.0

    def __call__(self) -> dict[str, float]:
        look = self._take(_look(self._endpoint))
        end_s = look.begun_s + _LOOK_S
        while any(got > sent for got, sent in map(look.bytes_of, WAYS.values())) and time.monotonic() < end_s:
            look = self._take(_look(self._endpoint))
        counts: dict[str, float] = {
            "connections": len(self._last[0]), "ended": self._ended,
            "sent_bytes": self._grown(0, "bytes_received"), "got_bytes": self._grown(0, "bytes_sent"),
            "half_closed_ms": round(1e3 * self._half_closed_s),
        }  # fmt: skip
        counts["unanswered"] = counts["sent_bytes"] if not counts["got_bytes"] else 0
        for number, way in enumerate(WAYS.values()):
            held_s, rate = self._held.get(way, (0.0, 0.0))
            counts |= {f"held_{way}_ms": round(1e3 * held_s), f"held_{way}_kbs": round(rate / 1e3, 1)}
            came, left = self._grown(number, "data_segs_in"), self._grown(1 - number, "data_segs_out")
            if came and left:
                size = self._grown(1 - number, "bytes_sent") / left
                counts |= {f"pieces_{way}": round(left / came, 2), f"piece_{way}_bytes": round(size, 1)}
        return counts

    def _grown(self, side: int, name: str) -> int:
        """The growth of a counter on the job's side (0) or on the endpoint's (1)."""
        first = self._first[side]
        return sum(max(0, one[name] - first.get(at, {}).get(name, 0)) for at, one in self._last[side].items())

    def _take(self, look: _Look) -> _Look:
        self._ended += len(self._before.job.keys() - look.job.keys())
        same = (look.job.keys(), look.upstream.keys()) == (self._before.job.keys(), self._before.upstream.keys())
        self._before = look
        for last, now in zip(self._last, (look.job, look.upstream), strict=True):
            last.update(now)
        if not same or len(look.job) != len(look.upstream):
            self._marks = {}  # what a connection held is not known any more when it has ended
        if len(look.job) <= len(look.upstream):
            self._half_closed_since_s = None
        elif self._half_closed_since_s is None:
            self._half_closed_since_s = look.ended_s
        else:
            self._half_closed_s = max(self._half_closed_s, look.begun_s - self._half_closed_since_s)
        if len(look.job) == len(look.upstream):
            for way in WAYS.values():
                self._weigh(way, look)
        return look

    def _weigh(self, way: str, look: _Look) -> None:
        got, sent = look.bytes_of(way)
        mark = self._marks.get(way)
        if mark is None or sent >= mark.got:
            self._marks[way] = _Mark(look, got, sent)
            return
        held_s = look.begun_s - mark.look.ended_s
        if held_s > self._held.get(way, (0.0, 0.0))[0]:
            self._held[way] = held_s, (sent - mark.sent) / held_s


def connections(endpoint: Endpoint) -> Mapping[str, Mapping[str, int]]:
    """The open connections of the job to the proxy, by peer: the kernel's counters at the proxy."""
    return _look(endpoint).job


def _look(endpoint: Endpoint) -> _Look:
    listen, target = (address.rpartition(":")[2] for address in (endpoint.listen, endpoint.upstream))
    begun_s = time.monotonic()
    only = f"( sport = :{listen} or dport = :{target} )"
    try:
        output = endpoint.api.run(["ss", "-tinpHO", "state", "established", "state", "close-wait", only])
    except OSError:  # the server is gone: so are its connections
        output = ""
    job: dict[str, Mapping[str, int]] = {}
    upstream: dict[str, Mapping[str, int]] = {}
    for line in output.splitlines():
        words = line.split()
        if len(words) < 5:
            continue
        state, (own, peer) = words[0], words[3:5]
        found = {name: int(number) for name, number in _INFO.findall(line)}
        info = {name: found.get(name, 0) for name in ("bytes_received", "bytes_sent", "data_segs_in", "data_segs_out")}
        if own.endswith(f":{listen}"):
            job[peer] = info
        elif state == "ESTAB" and f"pid={endpoint.api.pid}," in line:  # another process may use the endpoint directly
            upstream[own] = info
    return _Look(begun_s, time.monotonic(), job, upstream)
