"""Divides the wall-clock time of a round into classes. Pure. The divided time begins with the end of the round's first
step, because the start of the job belongs to no fault. It ends with the last step, or with the end of the run if the
job got stuck. The classes are *productive* (steps of the final history), *lost* (steps done again), *checkpoint*
(training stood still to save), *stalled* (the excess time of a step that took longer than LONG usual steps) and *down*
(from the last step of an attempt to the first step of the next attempt). ETTR = productive / wall (Meta, arXiv
2410.21680: productive runtime by wall-clock time; ByteRobust, arXiv 2509.16293). Runtime goodput = (training - lost) /
wall, in which saving and stalls count as training (Google's ML goodput)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median

from torchaos.harness.judging.checkpoints.standstill import standstill
from torchaos.harness.record.history import Executions, History
from torchaos.harness.record.record import Record

LONG = 3.0  # times the usual step


@dataclass(frozen=True)
class Clock:
    """The seconds of wall-clock time in each class. `wall_s` is their sum."""

    productive_s: float = 0.0
    lost_s: float = 0.0
    checkpoint_s: float = 0.0
    stalled_s: float = 0.0
    down_s: float = 0.0

    @property
    def wall_s(self) -> float:
        return float(sum(getattr(self, item.name) for item in fields(self)))

    @property
    def ettr(self) -> float | None:
        return self.productive_s / self.wall_s if self.wall_s else None

    @property
    def goodput(self) -> float | None:
        return (self.wall_s - self.down_s - self.lost_s) / self.wall_s if self.wall_s else None

    def __add__(self, other: Clock) -> Clock:
        return Clock(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(frozen=True)
class Ended:
    """A step that all ranks have done. `at_s`: the time at which the last rank had done it (CLOCK_MONOTONIC). `counts`:
    whether it belongs to the final history."""

    attempt: int
    local_step: int
    at_s: float
    counts: bool


def clock_of(run: Record) -> Clock:
    steps = steps_of(run.history)
    if not steps:
        return Clock()
    usual = usual_s(steps)
    saving = standstill(run.history).blocked
    found = Clock()
    for before, after in pairwise(steps):
        took = after.at_s - before.at_s
        if after.attempt != before.attempt:
            found += Clock(down_s=took)
            continue
        saved = min(saving.get((after.attempt, before.local_step), 0.0), took)
        stalled = max(0.0, took - saved - usual) if took - saved > LONG * usual else 0.0
        rest = took - saved - stalled
        found += Clock(
            rest if after.counts else 0.0, 0.0 if after.counts else rest, saved if after.counts else 0.0, stalled
        )
        if not after.counts:
            found += Clock(lost_s=saved)
    return found + Clock(down_s=_stuck_s(run, steps[-1].at_s))


def steps_of(history: History) -> list[Ended]:
    """The steps of each attempt, in order of time. A step ends when its last rank has done it."""
    counting = set(_each(history.by_step().executions))
    ends: dict[tuple[int, int], float] = {}
    for key, at_s in zip(_each(history.executions), history.executions.mono_s.tolist(), strict=True):
        ends[key] = max(ends.get(key, 0.0), at_s)
    found = [Ended(attempt, step, at_s, (attempt, step) in counting) for (attempt, step), at_s in ends.items()]
    return sorted(found, key=lambda one: one.at_s)


def _each(steps: Executions) -> Iterator[tuple[int, int]]:
    return zip(steps.attempt.tolist(), steps.local_step.tolist(), strict=True)


def usual_s(steps: list[Ended]) -> float:
    """The median step in seconds; 0 if there are too few steps."""
    gaps = [b.at_s - a.at_s for a, b in pairwise(steps) if a.attempt == b.attempt]
    return median(gaps) if gaps else 0.0


def _stuck_s(run: Record, last_s: float) -> float:
    """The seconds from the last step to the end of a run that did not end on purpose. In that time the job was down, or
    stood still."""
    if run.stopped is not None:
        return 0.0 if run.ended_on_purpose else max(0.0, run.stopped.mono_s - last_s)
    return max(0.0, run.exited.mono_s - last_s) if run.exited and run.exit_code not in (0, None) else 0.0
