"""Observer (c): what the ranks' processes use. All of them idle, with nothing that goes over the job's sockets; or a
few idle or stopped while the others spin, as they do when they wait for a GPU; or, whatever they do, nothing goes over
and what was sent is sent again and again.

A rank that compiles, evaluates or writes a checkpoint uses the CPU or the disk, and so the job is not quiet.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torchaos.harness.contracts import RankProcess
from torchaos.harness.machine import proc
from torchaos.harness.watching.observers.opinion import Learned, Opinion
from torchaos.harness.watching.observers.sockets import Sockets

_WINDOW_S = 0.4  # CPU time is counted in 10 ms: over less than this it says nothing
_IDLE, _SPINS = 0.15, 0.7  # of one core
_IO_BYTES = 32 << 10  # a rank that moves more than this in the window is at work
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass
class _Use:
    """What one process had used, at moments of the last half second: (moment, CPU seconds, bytes)."""

    past: deque[tuple[float, float, int]] = field(default_factory=deque)

    def add(self, now_s: float, cpu_s: float, io: int) -> None:
        self.past.append((now_s, cpu_s, io))
        while len(self.past) > 2 and now_s - self.past[1][0] >= _WINDOW_S:
            self.past.popleft()

    @property
    def whole(self) -> bool:
        return len(self.past) > 1 and self.past[-1][0] - self.past[0][0] >= _WINDOW_S

    @property
    def cores(self) -> float:
        (then, before, _), (now, after, _) = self.past[0], self.past[-1]
        return (after - before) / (now - then)

    @property
    def moved(self) -> int:
        return self.past[-1][2] - self.past[0][2]


class Idle:
    name = "metrics"

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}
        self._children = _Use()
        self._learned = Learned(needed=0)
        self._sockets = Sockets()
        self.stopped: list[int] = []
        self.idle: list[int] = []

    def look(self, now_s: float, training: bool, ranks: Sequence[RankProcess], late: bool = False) -> Opinion:
        """`late`: the job does not get on as usual. What happens meanwhile ends no pause that it makes by itself."""
        quiet = self._is_quiet(now_s, ranks)
        stuck = False
        if late or (quiet and now_s - (self._learned.since_s or now_s) > _WINDOW_S):
            self._sockets.look(ranks)
            stuck = self._sockets.stuck
            quiet = (quiet or stuck) and not self._sockets.moved
        else:
            self._sockets.forget()
        if not quiet or self._learned.since_s is None:
            self._learned.happened(now_s, training and not late)
        detail = "what they send does not arrive" if stuck else f"idle: {self.idle}"
        detail = f"stopped: {self.stopped}" if self.stopped else detail
        return self._learned.opinion(self.name, now_s, detail)

    def _is_quiet(self, now_s: float, ranks: Sequence[RankProcess]) -> bool:
        busy, spinning = [], []
        self.stopped, self.idle = [], []
        self._uses = {one.pid: self._uses.get(one.pid, _Use()) for one in ranks}
        for one in ranks:
            use, state = self._uses[one.pid], _add(self._uses[one.pid], now_s, one.pid)
            if state in ("T", "t"):
                self.stopped.append(one.rank)
            elif state == "D" or not use.whole or use.moved > _IO_BYTES or _IDLE < use.cores < _SPINS:
                busy.append(one.rank)
            elif use.cores <= _IDLE:
                self.idle.append(one.rank)
            else:
                spinning.append(one.rank)
        if busy or not ranks:
            return False
        away = len(self.idle) + len(self.stopped)
        if not spinning:
            return not self._children_work(now_s, ranks)
        return bool(away) and (2 * away < len(ranks) or bool(self.stopped and not self.idle))

    def _children_work(self, now_s: float, ranks: Sequence[RankProcess]) -> bool:
        """Compilers, data loaders. Looked at only while the ranks themselves are idle."""
        parents = {one.pid for one in ranks}
        cpu_s, added = 0.0, True
        everybody = {
            int(name): found for name in os.listdir("/proc") if name.isdigit() and (found := proc.stat(int(name)))
        }
        below: set[int] = set()
        while added:
            added = False
            for pid, found in everybody.items():
                if pid not in below and found.parent in parents | below:
                    below.add(pid)
                    added = True
        for pid in below - parents:
            cpu_s += _cpu_s(pid)
        self._children.add(now_s, cpu_s, 0)
        return self._children.whole and self._children.cores > _IDLE


def _add(use: _Use, now_s: float, pid: int) -> str:
    """Its state; takes down what it has used."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        moved = 0
        with suppress(OSError), open(f"/proc/{pid}/io", "rb") as file:
            moved = sum(int(line.split()[1]) for line in file.read().splitlines()[:2])
    except OSError:
        return "X"
    use.add(now_s, (int(fields[11]) + int(fields[12])) * _TICK_S + _queued_s(pid), moved)
    return fields[0].decode()


def _queued_s(pid: int) -> float:
    """How long its main thread has waited for a CPU: on a crowded machine a rank at work looks idle without this."""
    with suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/schedstat", "rb") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def _cpu_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S + _queued_s(pid)
    except OSError:
        return 0.0
