"""The times during which faults held up a job."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torchaos.harness.agent.wire import Kind
from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Stall:
    """The time for which a fault may hold up the job: from its application until its rollback, the end of the processes
    that it hit, the next fault, or the end of the run, whichever comes first. Times are CLOCK_MONOTONIC."""

    fault: str
    ranks: frozenset[int]
    since_s: float
    until_s: float
    died: bool = False  # the stall ended because the processes ended


def stalls_of(run: Record) -> Iterator[Stall]:
    """The stalls in order of time. A fault that hits several ranks at once makes one stall; a fault that is applied
    again after its rollback makes another."""
    starts: list[tuple[str, float, set[int]]] = []
    for hit in run.of_kind(Kind.APPLYING):
        ranks = {hit.rank} if hit.rank is not None else set()
        if (
            starts
            and starts[-1][0] == hit.data["fault"]
            and not _taken_back(run, starts[-1][0], starts[-1][1], hit.mono_s)
        ):
            starts[-1][2].update(ranks)
        else:
            starts.append((hit.data["fault"], hit.mono_s, set(ranks)))
    end = run.events[-1].mono_s if run.events else 0.0
    for number, (fault, since, ranks) in enumerate(starts):
        back = [e.mono_s for e in run.of_fault(fault, Kind.ROLLED_BACK) if e.mono_s > since]
        following = [start for _, start, _ in starts[number + 1 :]]
        exited = [e.mono_s for e in run.of_kind(Kind.JOB_EXITED) if e.mono_s > since]
        until = min([*back, *following, *exited, end])
        gone = _gone_at(run, fault, since)
        yield Stall(fault, frozenset(ranks), since, min(until, gone), died=gone < until)


def _gone_at(run: Record, fault: str, since_s: float) -> float:
    """The time at which the last process that the fault hit was gone. If it hit no rank: the time at which the last
    rank that was alive at `since_s` was gone. Infinite if some of these processes did not end."""
    hit = {e.data["pid"] for e in run.of_fault(fault, Kind.APPLYING) if e.rank is not None and e.mono_s >= since_s}
    exits = {e.data["pid"]: e.mono_s for e in run.of_kind(Kind.RANK_EXITED)}
    there = {
        e.data["pid"] for e in run.of_kind(Kind.RANK_UP) if e.mono_s <= since_s < exits.get(e.data["pid"], math.inf)
    }
    return max((exits.get(pid, math.inf) for pid in hit or there), default=math.inf)


def _taken_back(run: Record, fault: str, since_s: float, until_s: float) -> bool:
    return any(since_s < event.mono_s < until_s for event in run.of_fault(fault, Kind.ROLLED_BACK))
