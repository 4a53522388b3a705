"""What the ranks' TCP sockets say, in every network namespace that the ranks live in: by ss, which asks the kernel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise

from torchaos.harness.contracts import RankProcess

_SS_S = 2.0
# What came over and what the peers have confirmed. `bytes_sent` counts every retransmission again: it grows where
# nobody is there to receive.
_GONE_OVER = re.compile(r"\bbytes_(?:acked|received):(\d+)")
_BACKOFF, _UNACKED = re.compile(r"\bbackoff:(\d+)"), re.compile(r"\bunacked:\d+")
_LOST_TWICE = 2  # times that one segment was sent again: a healthy network loses one now and then


class Sockets:
    """`moved`: something went over since the look before. `stuck`: what a rank has sent is sent again and again."""

    def __init__(self) -> None:
        self.moved = self.stuck = False
        self._bytes: int | None = None

    def look(self, ranks: Sequence[RankProcess]) -> None:
        infos = list(_infos(ranks))
        total = sum(int(number) for info in infos for number in _GONE_OVER.findall(info))
        before, self._bytes = self._bytes, total
        self.moved = before is not None and total != before
        self.stuck = any(_is_stuck(info) for info in infos)

    def forget(self) -> None:
        """What went over before the next look is old news."""
        self._bytes = None


def _is_stuck(info: str) -> bool:
    """A peer that reads slowly is none: then nothing is under way, and the kernel only asks for room."""
    backoff = _BACKOFF.search(info)
    return backoff is not None and int(backoff[1]) >= _LOST_TWICE and _UNACKED.search(info) is not None


def _infos(ranks: Sequence[RankProcess]) -> Iterable[str]:
    """The kernel's words on each TCP socket of a rank; none where they can't be had."""
    pids = {f"pid={one.pid}," for one in ranks}
    for prefix in _namespaces(ranks):
        with suppress(OSError, subprocess.SubprocessError):
            argv = [*prefix, "ss", "-tinpH"]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_SS_S, check=False)
            for head, info in pairwise(done.stdout.splitlines()):
                if any(pid in head for pid in pids):
                    yield info


def _namespaces(ranks: Sequence[RankProcess]) -> Iterable[list[str]]:
    """For each network namespace of a rank, the prefix that looks from there."""
    found: dict[int, list[str]] = {}
    own = os.stat("/proc/self/ns/net").st_ino
    for one in ranks:
        with suppress(OSError):
            space = os.stat(f"/proc/{one.pid}/ns/net").st_ino
            found.setdefault(space, [] if space == own else ["nsenter", f"--net=/proc/{one.pid}/ns/net"])
    return found.values()
