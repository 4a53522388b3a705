"""Where each attempt resumed, and which complete checkpoints there were to resume from. Pure.

What counts as complete is what the run itself saw: every file of the checkpoint, as many as the others have, was
written to its end. A job may do more before it trusts one (rename it, write a digest), so the newest is *sure* only
when the ranks that wrote it went on to train, or to save again, before the attempt ended.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchaos.harness.history import Attempt, History, Save
from torchaos.harness.history.checkpoints import checkpoint_of
from torchaos.harness.judging.contents import is_below
from torchaos.harness.judging.damage import damages
from torchaos.harness.record import Record

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Kept:
    """One checkpoint, all its files together."""

    step: int  # global
    path: str
    attempt: int
    whole_s: float  # when its last file was written
    sure: bool


@dataclass(frozen=True)
class Resume:
    """An attempt that made steps, after another one that did."""

    attempt: Attempt
    reached: int  # the highest step before it
    best: Kept | None  # the newest checkpoint there was that is sure to be complete
    newer: Kept | None  # one that is newer still and may be complete


def resumes(run: Record) -> list[Resume]:
    """In order of attempt. One whose base is unknown is there too."""
    history, kept = run.history, _kept(run)
    found = []
    for attempt in history.attempts:
        own = [one.mono_s for one in history.executions if one.attempt == attempt.number]
        earlier = [one.global_step or 0 for one in history.executions if one.attempt < attempt.number]
        if not own or not earlier:
            continue
        loads = [load.mono_s for load in history.loads if load.attempt == attempt.number and load.mono_s <= min(own)]
        by_s = min(loads, default=attempt.started_s)
        there = [
            one for one in kept if one.attempt < attempt.number and one.whole_s <= by_s and not _hit(run, one, by_s)
        ]
        best = max((one for one in there if one.sure), key=lambda one: one.step, default=None)
        newer = [one for one in there if not one.sure and (best is None or one.step > best.step)]
        found.append(Resume(attempt, max(earlier), best, max(newer, key=lambda one: one.step, default=None)))
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
    inventory = run.artifacts.get("inventory")
    root = str(inventory.get("root", "")) if isinstance(inventory, Mapping) else run.plan.job.checkpoints or ""
    saves = [one for one in run.history.saves if one.global_step is not None]
    if isinstance(inventory, Mapping):
        saves = [one for one in saves if is_below(one.path, root)]  # a model exported elsewhere is no checkpoint
    groups: dict[tuple[int, int], list[Save]] = {}
    for save in saves:
        groups.setdefault((save.attempt, save.global_step or 0), []).append(save)
    sizes = {attempt.number: attempt.world_size for attempt in run.history.attempts}
    usual: dict[int, Counter[str]] = {}  # by world size
    for (attempt, _step), group in groups.items():
        usual[sizes[attempt]] = max(usual.get(sizes[attempt], Counter()), _files(group), key=Counter.total)
    return [
        _one(run, attempt, step, group)
        for (attempt, step), group in groups.items()
        if all(one.ok for one in group) and _files(group) >= usual[sizes[attempt]]
    ]


def _files(group: Iterable[Save]) -> Counter[str]:
    """The files of a checkpoint whatever its step, each as often as ranks wrote it."""
    return Counter(_NUMBER.sub("#", posixpath.basename(save.path)) for save in group for _rank in save.ranks)


def _one(run: Record, attempt: int, step: int, group: Sequence[Save]) -> Kept:
    whole_s = max(save.ended_s or 0.0 for save in group)
    first, ranks = group[0], {rank for save in group for rank in save.ranks}
    trained = [
        one.rank for one in run.history.executions if one.attempt == attempt and one.mono_s > whole_s
        and one.local_step > first.local_step and one.rank in ranks
    ]  # fmt: skip
    beside = any((save.ended_s or 0.0) - save.begun_s > 2 * save.blocked_s + 0.01 for save in group)  # in a thread
    again = any(save.attempt == attempt and save.begun_s > whole_s for save in run.history.saves)
    sure = again or (not beside and ranks <= set(trained))
    path = first.path if len(group) == 1 else posixpath.dirname(first.path)
    return Kept(step, path, attempt, whole_s, sure)


def _hit(run: Record, kept: Kept, by_s: float) -> bool:
    """Whether a fault damaged it before then."""
    return any(one.step == kept.step and one.at_s <= by_s and one.contents for one in damages(run))
