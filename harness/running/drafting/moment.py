"""Chooses the step of the first fault from a run without faults: a moment at which a wrong recovery shows most."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchaos.harness.judging.twins.first_uses import FirstUses
from torchaos.harness.record.record import Record

_BEST = re.compile("best", re.IGNORECASE)


@dataclass(frozen=True)
class Chosen:
    """`says`: where the step lies. `misses`: what a death there can't show, as clauses."""

    step: int
    says: str
    misses: tuple[str, ...] = ()


def chosen_in(run: Record) -> Chosen | None:
    """The step for a job that made this run. None if it made too few steps."""
    saves = [(save.global_step, save.path) for save in run.history.saves if save.ok and save.global_step]
    epoch = min(FirstUses(run.history.by_step()).repeated(), default=None)
    return chosen(run.history.last_step, saves, epoch)


def chosen(last: int | None, saves: Sequence[tuple[int, str]], epoch: int | None) -> Chosen | None:
    """The step at which a death costs work, and after which enough steps follow: between two checkpoints, after the
    second if possible, in a later epoch, and after the newest `best` checkpoint, because a job that has forgotten its
    best value writes it again anyway if a better one comes. It falls on no save. `last`: the last step. `saves`: the
    step and the path of each. `epoch`: the step with which the second epoch begins."""
    if last is None or last < 3:
        return None
    best = max((step for step, path in saves if _is_best(path) and step < last), default=0)
    name = next((posixpath.basename(path) for step, path in saves if step == best and _is_best(path)), "")
    early = [(step, path) for step, path in saves if step < last]
    at = sorted({step for step, path in early if not _is_best(path)} or {step for step, _ in early})
    if not at:
        return Chosen(last // 2 + 1, "", ("the job saved nothing before its end, so a death costs everything",))
    wanted = [limit for limit in (epoch, best) if limit]
    places = at[1:] or at
    free = _free(last, saves)
    ends = dict(pairwise([*at, last]))
    begin = max(
        places,
        key=lambda step: (sum(step >= limit for limit in wanted), bool(free & {*range(step + 1, ends[step])}), -step),
    )
    end = ends[begin]
    middle = min(begin + max(1, (end - begin) // 2), last - 1)
    between = free & {*range(begin + 1, end)}
    step = min(between, key=lambda step: (abs(step - middle), step), default=middle)
    misses = []
    if epoch and begin < epoch:
        misses.append("no checkpoint follows the second epoch's begin: a wrong order of samples in it does not show")
    elif not epoch:
        misses.append("one epoch was seen: the order of samples in a later epoch does not show")
    if begin < best:
        misses.append(
            f"{name} was last written after step {best}, which comes later: a forgotten best value does not show"
        )
    return Chosen(step, f"in step {step}, after the save of step {begin}", tuple(misses))


def _is_best(path: str) -> bool:
    return bool(_BEST.search(posixpath.basename(path)))


def _free(last: int, saves: Iterable[tuple[int, str]]) -> set[int]:
    """The steps at which no family of files is saved, by its period."""
    families: dict[str, list[int]] = {}
    for step, path in sorted(saves):
        families.setdefault(re.sub(r"\d+", "", path), []).append(step)
    periods = {math.gcd(*(b - a for a, b in pairwise(steps))) for steps in families.values() if len(steps) > 1}
    return {step for step in range(1, last) if not any(step % each == 0 for each in periods if each > 1)}
