"""Iterations that made no optimizer step, as when a loss scale is too large. If other ones are skipped than in the
twin, every later step has the samples and the rate of another step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torchaos.harness.analysis.claims import said
from torchaos.harness.record.history import Execution, StepTable


def other_skips(ours: Mapping[int, Mapping[int, Execution]], theirs: Mapping[int, Mapping[int, Execution]]) -> str:
    """A clause about the first step before which another number of iterations was skipped than in the twin. Empty if
    none was seen.

    It is seen by a schedule that goes on in each iteration: its counter went on by another number than in the twin,
    the optimizer's by the same, and the samples are others too. A schedule that is not restored differs already in the
    first step of an attempt, and leaves the samples as they are."""
    mine, twins = StepTable.of(ours), StepTable.of(theirs)
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
