"""Ranks that took over each other's samples after a restart, as with a sampler that deals them out anew. The sum over
the ranks is the same, so each loss is compared with that of the twin's rank that had the same samples. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np

from torchaos.harness.judging.twins.samples import any_summed
from torchaos.harness.record.history import Execution, StepTable
from torchaos.harness.record.steps import Both
from torchaos.harness.record.steps.execution import with_values
from torchaos.harness.record.steps.samples import sums_of


def in_the_twins_seats(ours: StepTable, theirs: StepTable) -> tuple[StepTable, list[int]]:
    """The steps, in which each rank has the losses of the rank that consumed what this rank consumed in the twin, and
    the numbers of the steps that this changed."""
    both = Both.of(ours, theirs)
    unseen = ~(both.ours.executions.samples_known & both.theirs.executions.samples_known)
    moved = both.ours.any(~both.equal("samples_sum")) & ~both.ours.any(unseen)
    first_rows = np.searchsorted(ours.executions.global_step, both.ours.numbers[moved])
    changed, new = [], dict[int, Execution]()
    for step, row in zip(both.ours.numbers[moved].tolist(), first_rows.tolist(), strict=True):
        if seated := _seated(ours[step], theirs[step]):
            changed.append(step)
            new.update(enumerate(seated, row))
    return (StepTable(ours.executions.replaced(new)) if new else ours), changed


def _seated(ours: Mapping[int, Execution], theirs: Mapping[int, Execution]) -> list[Execution]:
    """The step's executions in order of rank. Empty if the ranks did not just exchange their samples, or if two ranks
    consumed the same."""
    by_sum = any_summed(ours, theirs)

    def samples(execution: Execution) -> Hashable:
        return sums_of(execution)[:2] if by_sum else execution.samples

    by_samples = {samples(execution): execution for execution in ours.values()}
    if by_samples.keys() != set(map(samples, theirs.values())) or len(by_samples) < len(ours):
        return []
    donors = [(ours[rank], by_samples[samples(theirs[rank])]) for rank in sorted(ours)]
    return [
        with_values(own, {name: getattr(donor, name) for name in ("losses", "samples", "indices", "sums")})
        for own, donor in donors
    ]
