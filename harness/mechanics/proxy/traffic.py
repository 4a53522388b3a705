"""Counts the job's traffic through a proxy, from the kernel's data about its connections (TCP_INFO, by ss)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchaos.harness.mechanics.proxy.server import Endpoint

_INFO = re.compile(r"\b(bytes_received|bytes_sent):(\d+)")


class Traffic:
    """Each call returns the counts since this object was made: bytes that the job sent and got, `unanswered` (bytes
    sent, if none came back), connections seen, and connections that `ended`. Only the job knows the proxy's port, so
    all connections are the job's. A connection that begins and ends between two calls is not seen."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._first = connections(endpoint)  # by peer: bytes received and sent by the proxy
        self._last: dict[str, tuple[int, int]] = dict(self._first)
        self._gone: dict[str, int] = {}  # how often a connection from that peer ended
        self._living = set(self._first)

    def __call__(self) -> dict[str, float]:
        now = connections(self._endpoint)
        for peer in self._living - now.keys():
            self._gone[peer] = self._gone.get(peer, 0) + 1
        self._living = set(now)
        self._last.update(now)
        sent, got = (
            sum(max(0, last[way] - self._first.get(peer, (0, 0))[way]) for peer, last in self._last.items())
            for way in (0, 1)
        )
        return {
            "connections": len(self._last), "ended": sum(self._gone.values()), "sent_bytes": sent, "got_bytes": got,
            "unanswered": sent if not got else 0,
        }  # fmt: skip


def connections(endpoint: Endpoint) -> Mapping[str, tuple[int, int]]:
    """The established connections, by peer: bytes that the proxy has got from the peer, and sent to it."""
    port = endpoint.listen.rpartition(":")[2]
    try:
        output = endpoint.api.run(["ss", "-tinHO", "state", "established", f"( sport = :{port} )"])
    except OSError:  # the server is gone: so are its connections
        return {}
    counts = {}
    for line in output.splitlines():
        info = {name: int(number) for name, number in _INFO.findall(line)}
        peer = line.split()[3] if len(line.split()) > 3 else line
        counts[peer] = (info.get("bytes_received", 0), info.get("bytes_sent", 0))
    return counts
