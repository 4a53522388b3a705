"""Measures for how long training stopped for each checkpoint. This includes the time in which the job waits for a save
in another thread: a save that returns at once blocks only for the time of its call, but the job may still wait for its
end. Then the rank is in no phase of a step from the begin of the save to its end, and goes on when the save has
ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.record.history import Executions, History, Save
from torchaos.harness.record.history.checkpoints import blocked_by_step

_SOON_S, _SOON_SHARE = 0.05, 0.1  # in seconds, and as a share of the save's length

Key = tuple[int, int]  # attempt, local steps before the save

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Standstill:
    """The seconds without training that each checkpoint caused. `blocked`: seen. `possible`: an upper bound, which also
    counts the time during the write in which some rank was in no phase of a step."""

    blocked: Mapping[Key, float]
    possible: Mapping[Key, float]


def standstill(history: History) -> Standstill:
    """The seconds without training for each checkpoint, from the steps and saves of a run."""
    saves = [save for save in history.saves if save.ended_s is not None]
    called = blocked_by_step(saves)
    blocked, possible = dict(called), dict(called)
    for gap in _gaps(history.executions, saves):
        beside = [save for save in gap.saves if save.attempt == gap.attempt and gap.holds_end_of(save)]
        if not beside:
            continue
        last = max(beside, key=lambda save: save.ended_s or 0.0)
        key, until = (last.attempt, last.local_step), last.ended_s or 0.0
        waited = min(gap.idle_s, until - max(gap.begun_s, min(save.begun_s for save in beside)))
        possible[key] = max(possible[key], waited)
        if gap.works_s - until <= gap.usual_s + gap.saving_s + _SOON_S + _SOON_SHARE * waited:
            blocked[key] = max(blocked[key], waited)
    return Standstill(blocked, possible)


@dataclass(frozen=True)
class _Gap:
    """The gap between two steps of a rank. Times are CLOCK_MONOTONIC, durations in seconds."""

    attempt: int
    step: int  # the local step that ended when the gap began
    begun_s: float
    works_s: float  # when the rank began to work on the next step, at the latest
    saving_s: float  # in calls that save
    idle_s: float  # in no phase of a step, beyond the usual
    usual_s: float
    saves: Sequence[Save]  # saves that ended in the gap

    def holds_end_of(self, save: Save) -> bool:
        ended_s = save.ended_s or 0.0
        return save.local_step <= self.step and self.begun_s <= ended_s <= self.works_s


def _gaps(steps: Executions, saves: Sequence[Save]) -> Iterator[_Gap]:
    """The gaps in which a save ended."""
    saves = sorted(saves, key=lambda save: save.ended_s or 0.0)
    if not saves or not len(steps):
        return
    order = np.lexsort((steps.rank, steps.attempt))  # of one process in order of time
    new = (np.diff(steps.attempt[order]) != 0) | (np.diff(steps.rank[order]) != 0)
    saving_s, took_s, seen = steps.column("saving_s"), steps.column("took_s"), steps.column("in_phases") > 0
    for own in np.split(order, np.flatnonzero(new) + 1):
        yield from _gaps_of_process(steps.at(own), saving_s[own], took_s[own], seen[own], saves)


def _gaps_of_process(
    steps: Executions, saving: Array, took: Array, seen: Array, saves: Sequence[Save]
) -> Iterator[_Gap]:  # fmt: skip
    """`saving`, `took`: seconds in calls that save, and in all phases; `seen`: whether phases were seen."""
    with np.errstate(invalid="ignore"):  # a damaged record may have phases without end
        step, over_s, work = steps.local_step, steps.mono_s, took - saving
    new = np.flatnonzero((np.diff(step) == 1) & seen[1:]) + 1
    if not len(new):
        return
    idle = np.maximum(0.0, over_s[new] - over_s[new - 1] - work[new] - saving[new])
    usual = float(np.median(idle))
    begun_s, works_s = over_s[new - 1], over_s[new] - work[new]
    ends = np.array([save.ended_s or 0.0 for save in saves])
    first, last = np.searchsorted(ends, begun_s, "left"), np.searchsorted(ends, works_s, "right")
    for at in np.flatnonzero(first < last).tolist():
        old, now = int(new[at]) - 1, int(new[at])
        spent = float(idle[at]) + float(saving[now]) - usual
        yield _Gap(
            int(steps.attempt[0]), int(step[old]), float(begun_s[at]), float(works_s[at]), float(saving[now]),
            max(0.0, spent), usual, saves[first[at] : last[at]],
        )  # fmt: skip
