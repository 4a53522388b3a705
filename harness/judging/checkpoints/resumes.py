"""Where each attempt resumed, and which complete checkpoints there were to resume from. Pure.

What counts as a checkpoint is what an attempt resumed from, and its kin (points.py). What counts as complete is what
the run itself saw: every file of the checkpoint, as many as most others have, was written to its end. A job may do
more before it trusts one (rename it, write a digest), so the newest is *sure* only when the ranks that wrote it went
on to train, or to save again, before the attempt ended, or when the next attempt went on from its step. One in which
all ranks had a part and that lacks files all the same may be cut short, or the others have extras: it is there, and
never sure.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torchaos.harness.agent.wire import Kind
from torchaos.harness.judging.checkpoints.contents import is_below, root_of
from torchaos.harness.judging.checkpoints.damage import Damage, damages
from torchaos.harness.judging.checkpoints.points import Points, points_of
from torchaos.harness.record.history import Execution, History, Save, Segment
from torchaos.harness.record.history.checkpoints import checkpoint_of
from torchaos.harness.record.record import Record

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Kept:
    """One checkpoint, all its files together."""

    step: int  # global
    path: str
    attempt: int
    whole_s: float  # when its last file was written
    sure: bool
    lacks: tuple[str, ...] = ()  # files that most others have
    went_on: bool = True  # whoever wrote it trained on, or saved again


@dataclass(frozen=True)
class Resume:
    """What made steps after others: an attempt, or what one made after it had loaded a checkpoint again."""

    attempt: Segment
    reached: int  # the highest step before it
    best: Kept | None  # the newest checkpoint there was that is sure to be complete
    newer: Kept | None  # one that is newer still and may be complete


def resumes(run: Record) -> list[Resume]:
    """In order of attempt. One whose base is unknown is there too."""
    history, kept, damaged = run.history, _kept(run), [one for one in damages(run) if one.contents]
    found = []
    hits = list(run.of_kind(Kind.APPLYING, Kind.APPLIED))
    for part in history.segments:
        own = [one.mono_s for one in history.executions if (one.attempt, one.segment) == (part.number, part.after)]
        before = (part.number, part.after)
        earlier = [one.global_step or 0 for one in history.executions if (one.attempt, one.segment) < before]
        if not own or not earlier or part.in_memory:
            continue
        loads = [load.mono_s for load in history.loads if load.attempt == part.number and load.mono_s <= min(own)]
        by_s = part.started_s if part.after else min(loads, default=part.started_s)
        # What an attempt saved after a fault in its midst may hold the harm that it goes back behind.
        whole_s = max((one.mono_s for one in hits if one.mono_s <= by_s), default=by_s) if part.after else by_s
        there = [
            one for one in kept
            if one.attempt < part.number + (part.after > 0) and one.whole_s <= whole_s and not _hit(damaged, one, by_s)
        ]  # fmt: skip
        sure = [one for one in there if one.sure or one.step == part.base]  # that it was loaded shows it, too
        best = max(sure, key=lambda one: one.step, default=None)
        newer = [one for one in there if one not in sure and (best is None or one.step > best.step)]
        found.append(Resume(part, max(earlier), best, max(newer, key=lambda one: one.step, default=None)))
    return found


def resumed_in_words(history: History, attempt: int) -> str:
    """From where an attempt went on: for sentences about what differs in it."""
    found = history.attempt(attempt)
    earlier = any(one.attempt < attempt for one in history.executions)
    if found is None or found.base is None or not earlier:
        return "without any restart before it"
    return f"after the resume from step {found.base}"


def name_of(path: str) -> str:
    """What a checkpoint is called, whichever of its files the path is of."""
    return posixpath.basename(checkpoint_of(path))


def _kept(run: Record) -> list[Kept]:
    points, root = points_of(run), root_of(run)
    saves = [one for one in run.history.saves if one.global_step is not None]
    saves = [one for one in saves if is_below(one.path, root)]  # a model exported elsewhere is no checkpoint
    return [one for some in points.by_kind(saves) for one in _of_kind(run, some, points)]


def _of_kind(run: Record, saves: Sequence[Save], points: Points) -> list[Kept]:
    groups: dict[tuple[int, int], list[Save]] = {}
    for save in saves:
        groups.setdefault((save.attempt, save.global_step or 0), []).append(save)
    sizes = {attempt.number: attempt.world_size for attempt in run.history.attempts}
    of_size: dict[int, list[Sequence[Save]]] = {}
    for (attempt, _step), group in groups.items():
        of_size.setdefault(sizes[attempt], []).append(group)
    usual = {size: _usual(of_this) for size, of_this in of_size.items()}
    trained = {(one.attempt, one.rank): one for one in run.history.executions}  # the last: they are in order of time
    begun = {save.attempt: save.begun_s for save in sorted(run.history.saves, key=lambda one: one.begun_s)}
    kept = []
    for (attempt, step), group in groups.items():
        files, ranks = usual[sizes[attempt]]
        lacks = files - _files(group)
        if all(one.ok for one in group) and (not lacks or ranks <= _ranks(group)):
            last = [trained.get((attempt, rank)) for rank in _ranks(group)]
            found = _one(step, group, last, begun[attempt], lacks)
            if not (found.went_on and any(points.loads(name) for name in lacks)):
                kept.append(found)  # else the job never meant to write there all that a resume loads
    return kept


def _usual(groups: Sequence[Sequence[Save]]) -> tuple[Counter[str], set[int]]:
    """The files that checkpoints have most often, the larger set where two are as frequent; and who writes them."""
    often = Counter(frozenset(_files(group).items()) for group in groups)
    most = max(often.items(), key=lambda one: (one[1], sum(times for _file, times in one[0])))
    files = Counter(dict(most[0]))
    return files, set().union(*(_ranks(group) for group in groups if _files(group) == files))


def _ranks(group: Iterable[Save]) -> set[int]:
    return {rank for save in group for rank in save.ranks}


def _files(group: Iterable[Save]) -> Counter[str]:
    """The files of a checkpoint whatever its step, each as often as ranks wrote it."""
    return Counter(_NUMBER.sub("#", posixpath.basename(save.path)) for save in group for _rank in save.ranks)


def _one(
    step: int, group: Sequence[Save], trained: Sequence[Execution | None], begun_s: float, lacks: Collection[str]
) -> Kept:
    """`trained`: the last step of each rank that wrote it; `begun_s`: when the last save of the attempt was begun."""
    whole_s, first = max(save.ended_s or 0.0 for save in group), group[0]
    beside = any((save.ended_s or 0.0) - save.begun_s > 2 * save.blocked_s + 0.01 for save in group)  # in a thread
    went_on = all(one and one.mono_s > whole_s and one.local_step > first.local_step for one in trained)
    done = begun_s > whole_s or (not beside and went_on)
    path = first.path if len(group) == 1 else posixpath.dirname(first.path)
    return Kept(step, path, first.attempt, whole_s, done and not lacks, tuple(lacks), done)


def _hit(damaged: Iterable[Damage], kept: Kept, by_s: float) -> bool:
    """Whether a fault damaged it before then."""
    return any(one.step == kept.step and one.at_s <= by_s for one in damaged)
