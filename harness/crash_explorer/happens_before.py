"""Finds which operations of different ranks can't change their order, because ranks wait for each other in
collectives."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from torchaos.harness.agent.collective_stamps import Stamp, read_stamps
from torchaos.harness.agent.wire import ENV_PLAN
from torchaos.harness.crash_explorer.operations import Operation
from torchaos.harness.fault_drivers.storage.fs_rules import rank_of

# Finds which ranks write to the checkpoint folder, and copies the stamps of the collectives that these ranks run
# meanwhile.

_KNOWN_S = 1.0  # seconds for which a thread number is known; later it may be used by another thread
_PERIOD_S = 0.01
_COUNT_AT = 48  # offset of the number of collectives so far, in a file of stamps


@dataclass(frozen=True)
class Writer:
    rank: int | None
    pid: int


class Writers:
    """Finds the process and the rank of a thread. From a rank's first operation on, its collectives are copied from the
    agent's stamps to the file `to`, before the stamps wrap around. `plans` gets the path of each agent's plan."""

    def __init__(self, to: Path, plans: Path) -> None:
        self._to = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._said = plans
        self._known: dict[int, tuple[float, Writer]] = {}
        self._folders: set[Path] = set()  # folders of stamps
        self._copied: dict[Path, int] = {}  # how many collectives of each file are copied
        self._looked: set[int] = set()  # pids whose plan was searched for
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stamps", daemon=True)
        self._thread.start()

    def of(self, tid: int) -> Writer:
        now = time.monotonic()
        since, writer = self._known.get(tid, (0.0, None))
        if writer is None or now - since > _KNOWN_S:
            writer = Writer(rank_of(tid), _process_of(tid))
            self._known[tid] = (now, writer)
            if writer.rank is not None and writer.pid not in self._looked:
                self._looked.add(writer.pid)
                self._find_plan(writer.pid)
        return writer

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._copy_all()

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self._copy_all()

    def _find_plan(self, pid: int) -> None:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return
        plan = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry).get(ENV_PLAN.encode())
        if plan and (folder := Path(os.fsdecode(plan)).parent / "stamps") not in self._folders:
            self._folders.add(folder)
            with open(self._said, "ab") as file:
                file.write(plan + b"\n")

    def _copy_all(self) -> None:
        for path in [path for folder in list(self._folders) for path in folder.glob("*.stamps")]:
            copied = self._copied.get(path, 0)
            try:
                with open(path, "rb") as file:
                    head = file.read(_COUNT_AT + 8)
                if struct.unpack_from("q", head, _COUNT_AT)[0] == copied:
                    continue
                stamps = [stamp for stamp in read_stamps(path) if stamp.number > copied]
            except (OSError, ValueError, struct.error):
                continue
            for stamp in stamps:
                os.write(self._to, json.dumps(asdict(stamp)).encode() + b"\n")
            self._copied[path] = max((stamp.number for stamp in stamps), default=copied)


def _process_of(tid: int) -> int:
    try:
        with open(f"/proc/{tid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))
    except (OSError, StopIteration):
        return tid


# Finds which operations of different ranks can't change their order, because ranks wait for each other in collectives.
#
# An operation comes before a collective if it had ended when its rank began the collective, and after the collective if
# its rank had begun the collective. Some collectives do not wait (asynchronous collectives, and a broadcast for its
# root), but are treated as if they did. So fewer moments are tried than are possible. No impossible moment is tried, if
# ranks wait for each other in collectives only.
#
# A background thread that runs collectives of its own (an asynchronous save) is ordered by these collectives, and by
# everything that began before the thread did anything. All other threads are ordered by all collectives of their rank.

_UNKNOWN = (
    "{} writes, and when it waited for others is not known: its operations are tried only in the order that was seen"
)


def order(
    operations: Sequence[Operation], stamps: Sequence[Stamp]
) -> tuple[frozenset[tuple[int, int]], tuple[str, ...]]:
    """Pairs (a, b) of numbers of operations: a ends before b can begin; and sentences about what is not known."""
    if len({operation.rank for operation in operations}) < 2:
        return frozenset(), ()
    by_pid: dict[int, list[Stamp]] = {}
    for stamp in sorted(stamps, key=lambda each: each.number):
        by_pid.setdefault(stamp.pid, []).append(stamp)
    whole = {pid: own for pid, own in by_pid.items() if all(b.number - a.number == 1 for a, b in pairwise(own))}
    unknown = {operation.pid: operation.rank for operation in operations if operation.pid not in whole}
    names = {"a process of no rank" if rank is None else f"rank {rank}" for rank in unknown.values()}
    pairs = _waits(operations, whole) | _as_seen(operations, unknown)
    return frozenset(pairs), tuple(_UNKNOWN.format(name) for name in sorted(names))


def _as_seen(operations: Sequence[Operation], unknown: Mapping[int, object]) -> set[tuple[int, int]]:
    """The pairs that keep the operations of these processes at the place, among all others, at which they were seen."""
    pairs = set()
    for way in (operations, operations[::-1]):
        last: dict[int | None, int] = {}
        for operation in way:
            if operation.pid in unknown:
                pairs |= {(number, operation.number) for rank, number in last.items() if rank != operation.rank}
            last[operation.rank] = operation.number
    return {(min(pair), max(pair)) for pair in pairs}


def _waits(operations: Sequence[Operation], stamps: Mapping[int, Sequence[Stamp]]) -> set[tuple[int, int]]:
    last: dict[tuple[object, ...], list[tuple[int | None, int]]] = {}  # by collective: (rank, last operation before it)
    first: dict[tuple[object, ...], list[tuple[int | None, int]]] = {}  # likewise: (rank, first operation after it)
    for pid, own in stamps.items():
        mine = [operation for operation in operations if operation.pid == pid]
        threads = _Threads.of(mine, own)
        for stamp in own:
            same = (stamp.attempt, stamp.group, stamp.seq)
            before = max((thread.before(stamp) for thread in threads), default=-1)
            after = min((thread.after(stamp) for thread in threads), default=len(operations))
            if before >= 0:
                last.setdefault(same, []).append((stamp.rank, before))
            if after < len(operations):
                first.setdefault(same, []).append((stamp.rank, after))
    return {
        (a, b)
        for same, lasts in last.items()
        for rank, a in lasts
        for other, b in first.get(same, ())
        if rank != other and a < b
    }


@dataclass(frozen=True)
class _Threads:
    """The operations of a background thread that runs collectives of its own, or of all other threads of its rank."""

    own: int  # the number of the thread; 0: all other threads
    began_s: float
    ended_s: float
    ends: list[float]  # in order
    lasts: list[int]  # the highest number of an operation that had ended by each of these times
    begins: list[float]  # in order
    firsts: list[int]  # the lowest number of an operation that began at or after each of these times

    @classmethod
    def of(cls, operations: Sequence[Operation], stamps: Sequence[Stamp]) -> list[_Threads]:
        own = {stamp.thread for stamp in stamps if stamp.thread}
        found = []
        for thread in (0, *sorted(own)):
            mine = [op for op in operations if (op.tid == thread if thread else op.tid not in own)]
            if mine:
                at = [stamp.start_mono_s for stamp in stamps if stamp.thread == thread]
                found.append(cls._of(thread, mine, at))
        return found

    @classmethod
    def _of(cls, thread: int, operations: Sequence[Operation], at: Iterable[float]) -> _Threads:
        ended = sorted((op.ended_s, op.number) for op in operations)
        begun = sorted((op.begun_s, op.number) for op in operations)
        lasts = list(accumulate((number for _end, number in ended), max))
        firsts = list(accumulate((number for _begin, number in reversed(begun)), min))[::-1]
        moments = [begun[0][0], ended[-1][0], *at]
        return cls(
            thread,
            min(moments),
            max(moments),
            [end for end, _n in ended],
            lasts,
            [begin for begin, _n in begun],
            firsts,
        )

    def before(self, stamp: Stamp) -> int:
        """The last operation that had ended when the collective began; -1: none that the collective orders."""
        if self.own not in (0, stamp.thread) and self.ended_s > stamp.start_mono_s:
            return -1
        index = bisect_right(self.ends, stamp.start_mono_s)
        return self.lasts[index - 1] if index else -1

    def after(self, stamp: Stamp) -> int:
        """The first operation that began after the collective; a large number: none that the collective orders."""
        if self.own not in (0, stamp.thread) and self.began_s < stamp.start_mono_s:
            return 1 << 62
        index = bisect_left(self.begins, stamp.start_mono_s)
        return self.firsts[index] if index < len(self.firsts) else 1 << 62
