"""Whether losses and learning rates continue as in the twins, by step and rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.analysis.comparison.agreement import (
    Differing,
    before,
    differences,
    history_of,
    story,
    uneven,
    unreported,
    until,
)
from torchaos.harness.analysis.comparison.causes import likeliest_cause
from torchaos.harness.analysis.comparison.losses import Comparison, first_of, in_words, measured_of
from torchaos.harness.analysis.ending import final_step
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.missing_data import why_unplaced, why_unseen
from torchaos.harness.analysis.tolerance import CERTAIN, LEARNED_FACTOR, RATE, Steps, Tolerance, learned
from torchaos.harness.interfaces import Finding, First, What, failed, inconclusive, passed
from torchaos.harness.record.history import Executions, History, StepTable
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import Both
from torchaos.harness.record.steps.columns import lengths
from torchaos.harness.record.steps.executions import equal

_BLIND = "without a twin, steps that were done only once were compared with nothing"


def losses(run: Record, twins: Sequence[Record], tolerance: float | None = None) -> Finding:
    """Whether losses and learning rates are the twins', by step and rank; without a twin, whether steps that were
    done again had the same losses. `tolerance`: relative; None: none, or learned from twins that differ."""
    history = history_of(run, twins)
    if history.unplaced:
        return inconclusive(why_unplaced(run, history.unplaced))
    if not twins:
        return replace(_redone(run, history, tolerance or 0.0), bound={"tolerance": tolerance or 0.0})
    blind = next((twin for twin in twins if not twin.history.executions.loss_seen.any()), None)
    if blind:
        return inconclusive(f"the twin's losses were not seen: {why_unseen(blind, 'loss')}")
    comparison = Comparison(run, history, twins, tolerance)
    return replace(comparison.finding(), bound=comparison.bound)


def _redone(run: Record, history: History, tolerance: float) -> Finding:
    """Compares each step that was done again with its first execution."""
    olds, news = history.repeated()
    seen = olds.loss_seen & news.loss_seen
    if not seen.any():
        return inconclusive("there is no twin, and no step was done twice: nothing to compare the losses with")
    near = ~(equal(olds, news, "losses") & equal(olds, news, "lr")) & seen
    for old, new in zip(olds.at(near), news.at(near), strict=True):
        ours, theirs = {new.global_step or 0: {new.rank: new}}, {old.global_step or 0: {old.rank: old}}
        first = next(differences(ours, theirs, tolerance), None)
        if first:
            of_rank = news.rank == new.rank
            every = {one.global_step or 0: {one.rank: one} for one in olds.at(of_rank)}
            again = {one.global_step or 0: {one.rank: one} for one in news.at(of_rank)}
            cause = likeliest_cause(run, history, {**again, **ours}, {**every, **theirs}, first)
            words = f"{in_words(first, 'the first time')} {cause.words}"
            finding = failed(words, first_of(first), **measured_of(first))
            return replace(finding, cause=cause.short, at_s=new.mono_s)
    steps = np.unique(news.global_step[seen]).tolist()
    return passed(
        f"{'all ' if len(steps) > 1 else ''}{counted(len(steps), 'step', 'that was/that were')} done again "
        f"({steps[0]} to {steps[-1]}) gave the same losses as the first time; {_BLIND}",
        steps=len(steps),
    )


Array = npt.NDArray[Any]

_ROUNDING = RATE.floor


def rates(run: Record, twins: Sequence[Record], tolerance: float | None = None) -> Finding:
    """Whether the learning rates are the twins', by step and rank; without a twin, whether steps that were done
    again had the same rates. `tolerance`: relative; None: 1e-9, or learned from twins that differ."""
    history = history_of(run, twins)
    if not _has_rates(history.executions).any():
        return inconclusive("no learning rate was seen: no optimizer of torch made a step, and the log shows none")
    if history.unplaced:
        return inconclusive(why_unplaced(run, history.unplaced))
    given = Tolerance("given", _ROUNDING if tolerance is None else tolerance)
    if not twins:
        return replace(_redone_rates(history, given), bound={"tolerance": given.given})
    steps = [until(twin.history.by_step(), final_step(twin)) for twin in twins]
    landed = landings(run)
    early = before(history, landed[0].at_s if landed else float("inf"))
    allowed = early_allowed = given
    if tolerance is None and learned(steps, RATE).basis == "learned":
        allowed, early_allowed = learned(steps, RATE), learned(steps, RATE, max(early, default=0))
    invalid = next(_beyond(early, steps, early_allowed, CERTAIN), None)
    if invalid:
        words = _words(invalid, "in the twin")
        return inconclusive(f"the twin can't be compared with this run: before any fault, {words}")
    found = _compared(history, twins[0].history, steps, allowed)
    return replace(found, bound={"tolerance": allowed.largest})


def _compared(history: History, twin: History, twins: Sequence[StepTable], allowed: Tolerance) -> Finding:
    ours, theirs = history.by_step(), twins[0]
    first = next(_beyond(ours, twins, allowed, CERTAIN), None)
    if first and (first.ours is None or first.theirs is None):
        return inconclusive(
            f"{_words(first, 'in the twin')} Which parameter groups take part in a step is not the same, so their "
            "learning rates can't be compared."
        )
    if first and (odd := uneven(theirs)):
        return inconclusive(f"{_words(first, 'in the twin')} But {odd}: it is not known whether that is a defect.")
    if first:
        return failed(
            f"{_words(first, 'in the twin')} {story(history, ours, theirs, first)}", First(What.RATE, first.step),
            step=first.step, rank=first.rank, group=first.group, relative_difference=first.relative,
        )  # fmt: skip
    common, last, twins_last = ours.keys() & theirs.keys(), max(ours, default=0), max(theirs, default=0)
    dark = unreported(history, ours, twin, theirs)
    for steps in (ours, theirs):
        dark |= common & set(steps.numbers[steps.any(~_has_rates(steps.executions))].tolist())
    blind = min(dark, default=None)
    if blind is not None or not common:
        where = "in no step" if blind is None else f"in step {blind}"
        return inconclusive(f"the learning rate was not seen {where} on all ranks, in the run or in the twin")
    if last < twins_last:
        return inconclusive(
            f"the final history ends with step {last}, and the twin's with step {twins_last}: there are no learning "
            "rates of the steps between"
        )
    noisy = next((step for step in sorted(common) if not allowed.judges(step)), None)
    if noisy is not None:
        return inconclusive(
            f"too noisy to judge: in step {noisy} the learning rates of the twins differ from each other by "
            f"{allowed.spreads.get(noisy, math.inf):.2g}, for example because a schedule follows the loss"
        )
    near = next(_beyond(ours, twins, allowed), None)
    if near:
        return inconclusive(
            f"{_words(near, 'in the twin')} The twins differ from each other by {allowed.spreads[near.step]:.2g} "
            "there: a defect, or chance. More twins or a tolerance would decide."
        )
    equal = "the twin's" if allowed.basis == "given" else "as near to the twins' as the twins' are to each other"
    which = counted(len(common), "step")
    which = which if last == twins_last else f"the {which} that both made"
    return passed(f"the learning rates of {which} are {equal}", steps=len(common))


def _redone_rates(history: History, allowed: Tolerance) -> Finding:
    """Compares each step that was done again with its first execution. For a run without a twin."""
    olds, news = history.repeated()
    seen = _has_rates(olds) & _has_rates(news)
    if not seen.any():
        return inconclusive("there is no twin, and no step was done twice: nothing to compare the learning rates with")
    near = seen & ~equal(olds, news, "lr")
    for old, new in zip(olds.at(near), news.at(near), strict=True):
        step = new.global_step or 0
        first = next(_differences({step: {new.rank: new}}, {step: {old.rank: old}}, allowed, 1.0), None)
        if first:
            words = _words(first, "the first time")
            return replace(failed(words, First(What.RATE, step), step=step, rank=new.rank), at_s=new.mono_s)
    return passed(
        f"{counted(int(seen.sum()), 'step', 'that was/that were')} done again had the same learning rates as "
        "the first time; without a twin, steps "
        "that were done only once were compared with nothing"
    )


def _beyond(
    ours: Steps, twins: Sequence[Steps], allowed: Tolerance, factor: float = LEARNED_FACTOR
) -> Iterator[Differing]:
    """The differences that the run has from every twin, with the values of the first twin."""
    others = [
        {
            (difference.step, difference.rank, difference.group)
            for difference in _differences(ours, twin, allowed, factor)
        }
        for twin in twins[1:]
    ]
    for difference in _differences(ours, twins[0], allowed, factor):
        if all((difference.step, difference.rank, difference.group) in other for other in others):
            yield difference


def _differences(ours: Steps, theirs: Steps, allowed: Tolerance, factor: float) -> Iterator[Differing]:
    """The differences by step, for ranks and values that both runs have. After a change of the number of ranks, any
    rank of the twin is used, because all ranks follow the same schedule."""
    for step in _suspects(StepTable.of(ours), StepTable.of(theirs), allowed, factor):
        for rank, one in sorted(ours[step].items()):
            other = theirs[step].get(rank) or next(iter(theirs[step].values()))
            for group, (mine, twins) in enumerate(zip_longest(one.lr, other.lr) if one.lr and other.lr else ()):
                found = Differing(step, rank, group, mine, twins)
                if found.relative > _allowed(allowed, step, factor) or None in (mine, twins):
                    yield found


def _allowed(tolerance: Tolerance, step: int, factor: float) -> float:
    return max(_ROUNDING, tolerance.allowed(step, factor))


def _suspects(ours: StepTable, theirs: StepTable, allowed: Tolerance, factor: float) -> list[int]:
    """The steps of both runs in which a rate may differ by more than is allowed."""
    both = Both.of(ours, theirs)
    far = both.beyond("lr", lambda step: _allowed(allowed, step, factor))
    return sorted({*both.ours.numbers[both.ours.any(far)].tolist(), *both.apart.tolist()})


def _has_rates(steps: Executions) -> Array:
    return lengths(steps.column("lr")) > 0


def _words(first: Differing, other: str) -> str:
    group = f" of parameter group {first.group}" if first.group else ""
    told = ["none" if rate is None else f"{rate:.6g}" for rate in (first.ours, first.theirs)]
    return (
        f"the learning rate{group} differs first in step {first.step} on rank {first.rank}: {told[0]} instead of "
        f"{told[1]} {other}."
    )
