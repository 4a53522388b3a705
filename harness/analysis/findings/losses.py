"""Whether losses and learning rates continue as in the twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from torchaos.harness.analysis.comparison.agreement import differences, history_of
from torchaos.harness.analysis.comparison.causes import likeliest_cause
from torchaos.harness.analysis.comparison.losses import Comparison, first_of, in_words, measured_of
from torchaos.harness.analysis.missing_data import why_unplaced, why_unseen
from torchaos.harness.interfaces import Finding, failed, inconclusive, passed
from torchaos.harness.record.history import History
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
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
