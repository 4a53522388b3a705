"""Iterations that made no optimizer step, as when a loss scale is too large. If other ones are skipped than in the
twin, every later step has the samples and the rate of another step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.sample_counts import all_known, are_same, counts_of, digests_of, total_of
from torchaos.harness.record.history import Execution, StepTable
from torchaos.harness.record.steps import Both

_ENOUGH = 10  # steps: a job may clear gradients in each of millions
ByStep = Mapping[int, Mapping[int, Execution]]


def other_skips(ours: ByStep, theirs: ByStep, until: int | None = None) -> str:
    """A clause about the first step, `until` at the latest, before which another number of iterations was skipped than
    in the twin. Empty if none was seen."""
    mine, twins = StepTable.of(ours).up_to(until), StepTable.of(theirs)
    return _by_gradients(mine, twins) or _by_schedule(mine, twins)


def _by_gradients(mine: StepTable, twins: StepTable) -> str:
    """The job cleared gradients without an optimizer step, and the samples of the next step are those of an iteration
    that is later, or earlier, by the difference. A job that warms up or tries a step again clears gradients too, and
    its samples stay as they are."""
    both = Both.of(mine, twins)
    other = both.ours.any(~both.equal("dropped"))
    iterations = twins.numbers + np.cumsum(twins.most(twins.executions.column("dropped")))  # of the twin, by step
    for step in both.ours.numbers[other][:_ENOUGH].tolist():
        rank = min(mine[step])
        own, due = mine[step][rank].dropped, twins[step][rank].dropped
        wanted = int(iterations[twins.numbers == step][0]) + own - due
        there = twins.numbers[iterations == wanted].tolist()
        if _is_of(mine[step], twins, there):
            return said("dropped", ours=own, theirs=due, step=step)
    return ""


def _is_of(by_rank: Mapping[int, Execution], twins: StepTable, there: list[int]) -> bool:
    """Whether the samples of a step are those of the twin's step `there`. If that is empty, because the twin skipped
    that iteration or had ended by then: samples that the twin never used."""
    if not all_known(by_rank):
        return False
    if there:
        return all_known(twins[there[0]]) and are_same(by_rank, twins[there[0]])
    own = counts_of(by_rank)
    return bool(own) and not own.keys() & total_of(twins.values(), digests_of).keys()


def _by_schedule(mine: StepTable, twins: StepTable) -> str:
    """A schedule that goes on in each iteration shows it: its counter went on by another number than in the twin, the
    optimizer's by the same, and the samples are others too. A schedule that is not restored differs already in the
    first step of an attempt, and leaves the samples as they are."""
    for step in np.intersect1d(mine.numbers, twins.numbers).tolist():
        if step - 1 not in mine or step - 1 not in twins:
            continue
        rank = min(mine[step])
        own, before = (mine[at].get(rank) for at in (step, step - 1))
        other, before_there = (twins[at].get(rank) for at in (step, step - 1))
        if own is None or before is None or other is None or before_there is None:
            continue
        counters = own.sched_step, other.sched_step, before.sched_step, before_there.sched_step
        if None in counters or own.sched_step == other.sched_step:
            continue
        if before.sched_step != before_there.sched_step or before.attempt != own.attempt:
            return ""
        went_on = [(one.sched_step or 0) - (before.sched_step or 0) for one in (own, other)]
        is_shown = min(went_on) >= 1 and own.opt_step == other.opt_step and own.samples != other.samples
        return said("skips", step=step, ours=went_on[0], theirs=went_on[1]) if is_shown else ""
    return ""
