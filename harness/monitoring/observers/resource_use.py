"""The observer of the CPU, disk and network use of the ranks. The job is quiet in three cases:

- all ranks are idle and nothing arrives on the job's sockets; or
- a few ranks are idle or stopped while the others use the CPU fully, as ranks do while they wait for a GPU; or
- nothing arrives, and the kernel sends the same data again and again, whether or not the ranks are idle.

A rank that compiles, evaluates or writes a checkpoint uses the CPU or the disk, so the job is not quiet then.

`spinning` adds a fact to the report of a hang: GPUs that only wait. A kernel that waits for another GPU, as NCCL's
kernels do, keeps its own GPU busy all the time while no bytes go over the links. This is no reason to declare a hang,
because a kernel that only computes looks the same. `awaited` names the ranks for which such kernels wait."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from torchaos.harness.host import processes
from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.diagnosis.wait_graph import ranges
from torchaos.harness.monitoring.observers.hang_detectors import Learned, Opinion
from torchaos.harness.monitoring.probes.gpu_probe import Sample
from torchaos.harness.monitoring.probes.rank_probe import Sockets

_BUSY, _UNUSED, _LINKS = 99.0, 1.0, {"nvlink_bytes": "NVLink", "pcie_bytes": "PCIe"}
_MOST_LINK_BYTES = 1 << 20  # bytes per second over each link; even questions to the driver go over PCIe


def spinning(seen: Mapping[int, Sequence[Sample]], since_s: float) -> Iterator[tuple[int, str]]:
    """Yields (rank, clause) for each rank whose GPU was busy all the time since `since_s` (CLOCK_MONOTONIC) and moved
    hardly any bytes. A GPU with fewer than two samples, or without counters of bytes, is left out."""
    for gpu, samples in seen.items():
        during = [sample for sample in samples if sample.at_s >= since_s]
        if len(during) < 2 or any(sample.values.get("busy_percent", 0.0) < _BUSY for sample in during):
            continue
        first, last = during[0], during[-1]
        both = first.values.keys() & last.values.keys()
        moved = {words: last.values[name] - first.values[name] for name, words in _LINKS.items() if name in both}
        took_s = last.at_s - first.at_s
        if moved and all(0 <= many <= _MOST_LINK_BYTES * took_s for many in moved.values()):
            over = " and ".join(f"{many:.0f} bytes over {words}" for words, many in moved.items())
            for rank in last.ranks:
                yield rank, f"its GPU {gpu} was busy all the time for {took_s:.1f} s, and moved {over}"


def awaited(seen: Mapping[int, Sequence[Sample]], since_s: float) -> Iterator[tuple[int, str]]:
    """Yields (rank, clause) for each rank whose GPU did nothing since `since_s` (CLOCK_MONOTONIC), if the GPUs of all
    other ranks only wait, and the ranks that wait are the majority. Yields nothing if a GPU has fewer than two
    samples."""
    waiting, idle = {rank for rank, _ in spinning(seen, since_s)}, dict[int, int]()
    for gpu, samples in seen.items():
        during = [sample for sample in samples if sample.at_s >= since_s]
        if len(during) < 2:
            return
        if waiting.issuperset(own := during[-1].ranks):
            continue
        if any(sample.values.get("busy_percent", _BUSY) > _UNUSED for sample in during):
            return
        idle |= dict.fromkeys(own, gpu)
    if len(idle) < len(waiting):
        others = ranges(sorted(waiting))
        for rank, gpu in idle.items():
            yield rank, f"its GPU {gpu} did nothing, while the GPUs of {others} were busy and moved nothing"


_WINDOW_S = 0.4  # CPU time is counted in units of 10 ms, so a shorter window would be too coarse
IDLE, _SPINS = 0.15, 0.7  # parts of a core: a rank is idle below the first, and spins above the second
_IO_BYTES = 32 << 10  # a rank that reads and writes more than this in the window is at work
_MOST_RANKS = 8  # ranks that are described
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class _Sample(NamedTuple):
    """What a process has used since its start: CPU seconds, seconds of its main thread in the run queue, how often the
    kernel took the CPU from that thread, how often the thread gave up the CPU to wait, and bytes read and written."""

    at_s: float
    cpu_s: float
    queued_s: float
    put_off: int
    gave_up: int
    io: int


class Use:
    """The resources that one process used during the last window."""

    def __init__(self) -> None:
        self._past: deque[_Sample] = deque()
        self.state = "X"  # the letter of /proc/PID/stat; X: the process is gone

    def look(self, pid: int, now_s: float) -> None:
        found = processes.stat(pid)
        self.state = found.state if found else "X"
        if found is None:
            return
        self._past.append(_Sample(now_s, found.cpu_ticks * _TICK_S, _queued_s(pid), *_switches(pid), _moved(pid)))
        while len(self._past) > 2 and now_s - self._past[1].at_s >= _WINDOW_S:
            self._past.popleft()

    @property
    def whole(self) -> bool:
        return len(self._past) > 1 and self._past[-1].at_s - self._past[0].at_s >= _WINDOW_S

    @property
    def cores(self) -> float:
        """How many cores the process wanted: the share of the time in which it had the CPU, or the kernel had taken the
        CPU from it. So a thread that has work to do does not look idle on a busy machine. The time in the queue after
        the thread woke up does not count, so a rank that only looks at a page now and then stays idle."""
        first, last = self._past[0], self._past[-1]
        put_off, gave_up = last.put_off - first.put_off, last.gave_up - first.gave_up
        if self.state == "R" and not put_off + gave_up:
            return 1.0  # running, or ready to run, during the whole window
        queued_s = (last.queued_s - first.queued_s) * put_off / max(1, put_off + gave_up)
        return (last.cpu_s - first.cpu_s + queued_s) / (last.at_s - first.at_s)

    @property
    def moved(self) -> int:
        return self._past[-1].io - self._past[0].io


class Idle:
    """Observes whether the ranks are idle, stuck or stopped."""

    name = "metrics"

    def __init__(self) -> None:
        self._uses: dict[int, Use] = {}
        self._children: dict[int, Use] = {}
        self._learned = Learned(needed=0)
        self._sockets = Sockets()
        self.stopped: list[int] = []
        self.idle: list[int] = []

    def look(self, now_s: float, training: bool, ranks: Sequence[RankProcess], late: bool = False) -> Opinion:
        """For how long the job has been quiet. `late`: whether another observer sees no progress; then the quiet time
        is not learned as usual. Blind while the sockets can't be read."""
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
        opinion = self._learned.opinion(self.name, now_s, self._seen(ranks, stuck))
        return replace(opinion, blind=self._sockets.blind, ready=opinion.ready and not self._sockets.blind)

    def _seen(self, ranks: Sequence[RankProcess], stuck: bool) -> str:
        """The reasons for the opinion, in words."""
        uses = {rank.rank: self._uses[rank.pid] for rank in ranks}
        words = [
            f"rank {rank} {f'wants {use.cores:.2f} of a core' if use.whole else 'is new'}"
            for rank, use in uses.items() if rank not in self.stopped
        ]  # fmt: skip
        sockets = "the data that they send does not arrive" if stuck else "data arrives" if self._sockets.moved else ""
        found = [*(f"rank {rank} is stopped" for rank in self.stopped), *words[:_MOST_RANKS], sockets]
        return ", ".join(filter(None, found))

    def _is_quiet(self, now_s: float, ranks: Sequence[RankProcess]) -> bool:
        busy, spinning = [], []
        self.stopped, self.idle = [], []
        self._uses = {rank.pid: self._uses.get(rank.pid, Use()) for rank in ranks}
        for rank in ranks:
            use = self._uses[rank.pid]
            use.look(rank.pid, now_s)
            if use.state in ("T", "t"):
                self.stopped.append(rank.rank)
            elif use.state == "D" or not use.whole or use.moved > _IO_BYTES or IDLE < use.cores < _SPINS:
                busy.append(rank.rank)
            elif use.cores <= IDLE:
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
        """Whether child processes, such as compilers or data loaders, use the CPU. Called only while all ranks are
        idle."""
        parents = {rank.pid for rank in ranks}
        added = True
        everybody = {
            int(name): found for name in os.listdir("/proc") if name.isdigit() and (found := processes.stat(int(name)))
        }
        below: set[int] = set()
        while added:
            added = False
            for pid, found in everybody.items():
                if pid not in below and found.parent in parents | below:
                    below.add(pid)
                    added = True
        self._children = {pid: self._children.get(pid, Use()) for pid in below - parents}
        for pid, use in self._children.items():
            use.look(pid, now_s)
        return sum(use.cores for use in self._children.values() if use.whole) > IDLE


def _queued_s(pid: int) -> float:
    """How many seconds the main thread has spent in the run queue."""
    with suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/schedstat", "rb") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def _switches(pid: int) -> tuple[int, int]:
    """How often the kernel took the CPU from the main thread, and how often the thread gave it up; see
    proc_pid_status(5)."""
    found = {b"nonvoluntary_ctxt_switches": 0, b"voluntary_ctxt_switches": 0}
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file.read().splitlines()[-6:]:  # both are among the last fields
            name, _, number = line.partition(b":")
            if name in found:
                found[name] = int(number)
    put_off, gave_up = found.values()
    return put_off, gave_up


def _moved(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/io", "rb") as file:
        return sum(int(line.split()[1]) for line in file.read().splitlines()[:2])
    return 0
