"""Observer (c): the CPU, disk and network use of the ranks. The job is quiet if
- all ranks are idle and nothing arrives on the job's sockets; or
- a few ranks are idle or stopped while the others use the CPU fully, as ranks do while they wait for a GPU; or
- nothing arrives, and the kernel sends the same data again and again, whether or not the ranks are idle.

A rank that compiles, evaluates or writes a checkpoint uses the CPU or the disk, so the job is not quiet."""

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

_WINDOW_S = 0.4  # CPU time is counted in units of 10 ms, so a shorter window would be too coarse
_IDLE, _SPINS = 0.15, 0.7  # parts of a core: at most and at least
_IO_BYTES = 32 << 10  # a rank that reads and writes more in the window is at work
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass
class _Use:
    """The use of one process during the last window: (time, CPU seconds, bytes read and written), each since its
    start."""

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
    """Observes whether the ranks are idle, stuck or stopped."""

    name = "metrics"

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}
        self._children = _Use()
        self._learned = Learned(needed=0)
        self._sockets = Sockets()
        self.stopped: list[int] = []
        self.idle: list[int] = []

    def look(self, now_s: float, training: bool, ranks: Sequence[RankProcess], late: bool = False) -> Opinion:
        """How many seconds the job has been quiet. `late`: another observer sees no progress; then the quiet time does
        not end when a process is active, and is not learned as usual."""
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
        detail = "the data that they send does not arrive" if stuck else f"idle: {self.idle}"
        detail = f"stopped: {self.stopped}" if self.stopped else detail
        return self._learned.opinion(self.name, now_s, detail)

    def _is_quiet(self, now_s: float, ranks: Sequence[RankProcess]) -> bool:
        busy, spinning = [], []
        self.stopped, self.idle = [], []
        self._uses = {rank.pid: self._uses.get(rank.pid, _Use()) for rank in ranks}
        for rank in ranks:
            use, state = self._uses[rank.pid], _add(self._uses[rank.pid], now_s, rank.pid)
            if state in ("T", "t"):
                self.stopped.append(rank.rank)
            elif state == "D" or not use.whole or use.moved > _IO_BYTES or _IDLE < use.cores < _SPINS:
                busy.append(rank.rank)
            elif use.cores <= _IDLE:
                self.idle.append(rank.rank)
            else:
                spinning.append(rank.rank)
        if busy or not ranks:
            return False
        away = len(self.idle) + len(self.stopped)
        if not spinning:
            return not self._children_work(now_s, ranks)
        return bool(away) and (2 * away < len(ranks) or bool(self.stopped and not self.idle))

    def _children_work(self, now_s: float, ranks: Sequence[RankProcess]) -> bool:
        """Whether child processes, such as compilers or data loaders, use the CPU. It is called only while all ranks
        are idle."""
        parents = {rank.pid for rank in ranks}
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
    """The state letter of a process; adds its current use to `use`. "X": it is gone."""
    found = proc.stat(pid)
    if found is None:
        return "X"
    moved = 0
    with suppress(OSError), open(f"/proc/{pid}/io", "rb") as file:
        moved = sum(int(line.split()[1]) for line in file.read().splitlines()[:2])
    use.add(now_s, found.cpu_ticks * _TICK_S + _queued_s(pid), moved)
    return found.state


def _queued_s(pid: int) -> float:
    """The seconds for which the main thread has waited for a CPU. Without them, a working rank looks idle on a busy
    machine."""
    with suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/schedstat", "rb") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def _cpu_s(pid: int) -> float:
    found = proc.stat(pid)
    return 0.0 if found is None else found.cpu_ticks * _TICK_S + _queued_s(pid)
