"""Examines the ranks' TCP sockets with ss, in each network namespace of the ranks."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise

from torchaos.harness.interfaces import RankProcess

_SS_S = 5.0  # a busy machine needs much longer than the usual 10 ms
# Bytes that were received, and bytes that a peer has confirmed. `bytes_sent` does not show that data arrives: it counts
# each retransmission, so it grows without a receiver too.
_ARRIVED = re.compile(r"\bbytes_(?:acked|received):(\d+)")
_BACKOFF, _UNACKED = re.compile(r"\bbackoff:(\d+)"), re.compile(r"\bunacked:\d+")
_LOST_TWICE = 2  # retransmissions of a segment; a healthy network loses a segment now and then


class Sockets:
    """The state of the ranks' sockets. `moved`: bytes were transported since the previous look. `stuck`: data of a rank
    is sent again and again; `losing`: at least once. `blind`: why the sockets can't be read; empty if they can."""

    def __init__(self) -> None:
        self.moved = self.stuck = self.losing = False
        self.blind = ""
        self._bytes: int | None = None

    def look(self, ranks: Sequence[RankProcess]) -> None:
        self.moved = self.stuck = self.losing = False
        try:
            infos = list(_infos(ranks))
        except (OSError, subprocess.SubprocessError) as error:
            self.blind = f"ss can't read the ranks' sockets: {error}"
            return
        self.blind = ""
        total = sum(int(number) for info in infos for number in _ARRIVED.findall(info))
        before, self._bytes = self._bytes, total
        self.moved = before is not None and total != before
        lost = max(map(_lost, infos), default=0)
        self.stuck, self.losing = lost >= _LOST_TWICE, lost > 0

    def forget(self) -> None:
        """Forgets the counters, so that bytes before the next look are not counted."""
        self._bytes, self.blind = None, ""


def _lost(info: str) -> int:
    """How often unconfirmed data was sent again. If a peer reads slowly, this is 0: then no data is on the way, and the
    kernel only probes the peer's window."""
    backoff = _BACKOFF.search(info)
    return int(backoff[1]) if backoff and _UNACKED.search(info) else 0


def _infos(ranks: Sequence[RankProcess]) -> Iterable[str]:
    """Yields ss's description of each TCP socket of the ranks. Raises OSError or SubprocessError if ss fails."""
    pids = {f"pid={rank.pid}," for rank in ranks}
    for prefix in _namespaces(ranks):
        argv = [*prefix, "ss", "-tinpH"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SS_S, check=True)
        for head, info in pairwise(done.stdout.splitlines()):
            if any(pid in head for pid in pids):
                yield info


def _namespaces(ranks: Sequence[RankProcess]) -> Iterable[list[str]]:
    """For each network namespace of the ranks, the command prefix that enters it."""
    found: dict[int, list[str]] = {}
    own = os.stat("/proc/self/ns/net").st_ino
    for rank in ranks:
        with suppress(OSError):
            space = os.stat(f"/proc/{rank.pid}/ns/net").st_ino
            found.setdefault(space, [] if space == own else ["nsenter", f"--net=/proc/{rank.pid}/ns/net"])
    return found.values()
