"""Finds which operations of different ranks can't change their order, because ranks wait for each other in collectives.

An operation comes before a collective if it had ended when its rank began the collective, and after the collective if
its rank had begun the collective. Some collectives do not wait (asynchronous collectives, and a broadcast for its
root), but are treated as if they did. So fewer moments are tried than are possible. No impossible moment is tried, if
ranks wait for each other in collectives only.

A background thread that runs collectives of its own (an asynchronous save) is ordered by these collectives, and by
everything that began before the thread did anything. All other threads are ordered by all collectives of their rank."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchaos.harness.agent.stamps import Stamp
from torchaos.harness.exploring.operations import Operation

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
