"""Decides whether a job saves at fixed steps or at fixed times. At fixed times, each run saves at other steps.

Also measures for how long training stopped for each checkpoint. This includes waiting for a save in another thread: a
save that returns at once blocks only for the time of its call, but the job may later wait for its end. During such a
wait, the rank is in no phase of a step from the beginning of the save to its end, and goes on when the save has
ended."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.analysis.checkpointing.checkpoint_contents import is_below, root_of
from torchaos.harness.analysis.checkpointing.resume_points import family, points_of
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.record.checkpoint_names import number_in_name
from torchaos.harness.record.history import Executions, History, Save
from torchaos.harness.record.record import Record

_ENOUGH = 3  # the fewest gaps between saves from which this is judged
_REGULAR = 1.5  # the longest gap divided by the shortest, at most


def saves_vary(run: Record, twins: Sequence[Record]) -> bool:
    """Whether the record shows that each run saves at other steps. That is so in four cases: the twins differ; the run
    differed before its first fault; no fixed number of steps explains the first save after a resume; or the seconds
    between saves are regular and the steps between them are not."""
    last = min((twin.history.last_step or 0 for twin in twins), default=0)
    if any(_saved(twin, last - 1) != _saved(twins[0], last - 1) for twin in twins[1:]):
        return True
    landed = landings(run)
    reached = run.history.highest_step(before_s=landed[0].at_s) if landed else run.history.last_step
    if twins and reached and _saved(run, reached - 1, first=True) != _saved(twins[0], reached - 1):
        return True
    if twins and _leaves_the_grid(run, twins[0]):
        return True
    gaps = [gap for record in (run, *twins) for gap in _gaps_between_saves(record)]
    if len(gaps) < _ENOUGH or len({steps for steps, _seconds in gaps}) == 1:
        return False
    seconds = [seconds for _steps, seconds in gaps]
    return max(seconds) <= _REGULAR * min(seconds)


def _saved(record: Record, until: int, first: bool = False) -> set[tuple[str, int]]:
    """Family and global step of each save up to step `until`, of the ranks that make steps. `first`: only those of the
    first attempt."""
    train = set(record.history.executions.ranks)
    return {
        (_kin(save, record), save.global_step)
        for save in record.history.saves
        if save.global_step is not None and save.global_step <= until and is_below(save.path, root_of(record))
        if not train.isdisjoint(save.ranks)
        if not (first and save.attempt)
    }


def _kin(save: Save, record: Record) -> str:
    """The family of the path below the checkpoint folder. A run and its twin have the same families."""
    root = root_of(record)
    return family(posixpath.relpath(save.path, root) if root else save.path)


def _leaves_the_grid(run: Record, twin: Record) -> bool:
    """Whether the twin saved at a fixed interval of steps, and the first save of the run after a resume does not fit
    that interval, counted from the start of the job or from the resume.

    If the name of the save has another step than the twin's names, that shows a wrong step count, not a timer."""
    last = max(record.history.last_step or 0 for record in (run, twin))
    for base, save in _first_after_resumes(run):
        theirs = [other for other in twin.history.saves if _kin(other, twin) == _kin(save, run)]
        steps = sorted({other.global_step or 0 for other in theirs} - {last})
        every, at = {b - a for a, b in pairwise(steps)}, save.global_step
        if at in (None, last) or len(steps) < _ENOUGH or len(every) > 1:
            continue
        offsets = {(at - start) % max(every) for start in (0, steps[0], base, base + steps[0])}
        if 0 not in offsets and _ahead(save) in {_ahead(other) for other in theirs}:
            return True
    return False


def _first_after_resumes(run: Record) -> Iterator[tuple[int, Save]]:
    """Yields the first save of each family in each attempt but the first, with the step from which the attempt resumed.

    Only checkpoints that the job resumes from are included, because a metric decides when the best checkpoint is
    written. Saves after a fault in that attempt are left out, because a fault may make a job save at once."""
    points, landed, root = points_of(run), landings(run), root_of(run)
    bases = {attempt.number: attempt.base for attempt in run.history.attempts[1:]}
    seen: set[tuple[int, str]] = set()
    for save in sorted(run.history.saves, key=lambda save: save.begun_s):
        base, key = bases.get(save.attempt), (save.attempt, _kin(save, run))
        if base is None or key in seen or not is_below(save.path, root) or not points.has(save.path):
            continue
        seen.add(key)
        if not any(landing.attempt == save.attempt and landing.at_s <= save.begun_s for landing in landed):
            yield base, save


def _ahead(save: Save) -> int | None:
    """How far the number in the checkpoint's name is ahead of the step of the save. None if the name contains no
    number."""
    number = number_in_name(save.path)
    return None if number is None else number - (save.global_step or 0)


def _gaps_between_saves(record: Record) -> list[tuple[int, float]]:
    """(steps, seconds) between successive saves of an attempt, without the save after the run's last step."""
    begun: dict[tuple[int, int], float] = {}
    for save in sorted(record.history.saves, key=lambda save: save.begun_s):
        if save.global_step is not None and save.global_step != record.history.last_step:
            begun.setdefault((save.attempt, save.global_step), save.begun_s)
    return [(b[1] - a[1], begun[b] - begun[a]) for a, b in pairwise(begun) if a[0] == b[0]]


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
    for gap in _gaps_with_saves(history.executions, saves):
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


def blocked_by_step(saves: Iterable[Save]) -> Mapping[tuple[int, int], float]:
    """For how many seconds training waited for each checkpoint with all its files, by (attempt, local step). A rank
    waits for its files one after the other, and the ranks wait at the same time. So the rank that waited longest
    counts."""
    of_rank: dict[tuple[int, int, int], float] = defaultdict(float)
    for save in saves:
        for rank in save.ranks:
            of_rank[save.attempt, save.local_step, rank] += save.blocked_s
    found: dict[tuple[int, int], float] = {}
    for (attempt, step, _rank), blocked_s in of_rank.items():
        found[attempt, step] = max(found.get((attempt, step), 0.0), blocked_s)
    return found


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


def _gaps_with_saves(steps: Executions, saves: Sequence[Save]) -> Iterator[_Gap]:
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
