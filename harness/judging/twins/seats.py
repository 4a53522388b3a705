"""Ranks that took over each other's samples after a restart, as with a sampler that deals them out anew. The sum over
the ranks is the same, so each loss is compared with that of the twin's rank that had the same samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torchaos.harness.record.history import Execution, StepTable
from torchaos.harness.record.steps import Both
from torchaos.harness.record.steps.execution import with_values


def in_the_twins_seats(ours: StepTable, theirs: StepTable) -> tuple[StepTable, list[int]]:
    """The steps, in which each rank has the losses of the rank that consumed what this rank consumed in the twin, and
    the numbers of the steps that this changed."""
    both = Both.of(ours, theirs)
    unseen = ~(both.ours.executions.samples_seen & both.theirs.executions.samples_seen)
    moved = both.ours.any(~both.equal("samples")) & ~both.ours.any(unseen)
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
    by_samples = {execution.samples: execution for execution in ours.values()}
    if by_samples.keys() != {execution.samples for execution in theirs.values()} or len(by_samples) < len(ours):
        return []
    donors = [(ours[rank], by_samples[theirs[rank].samples]) for rank in sorted(ours)]
    return [
        with_values(own, {"losses": donor.losses, "samples": donor.samples, "indices": donor.indices})
        for own, donor in donors
    ]
