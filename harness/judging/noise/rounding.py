"""By how much a run may differ from its twin through rounding alone. All assertions use this rule: for losses,
parameters, checkpoints, and samples that the job computes from its parameters (twins/computed.py).

With three ranks or more, DDP sums gradients in another order after any restart: it rebuilds its buckets after the first
step of a process, so the first step after a restart has other buckets than the same step of the twin. The sums then
differ in their last bits, and training makes the difference grow. Two ranks have only one order, because a + b = b + a.

So bits must be equal before the first restart, and always on two ranks. On three ranks or more, a value that was
computed after a restart counts as equal if its relative difference is at most ROUNDING. With
`find_unused_parameters=True`, DDP does not rebuild its buckets, and FSDP has no buckets. Such jobs are bitwise equal,
and an assertion says so."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torchaos.harness.record.history import History

ROUNDING = 1e-5  # relative: float32 sums differ by about 1e-7 at first, which stays below this for about 100 steps
LOW_PRECISION = 2**-7  # relative: the last bit of a bfloat16
_GROWTH = 100.0  # the largest factor by which rounding may grow from a step to the next
_MANY = 3  # ranks: the least number for which a sum has several orders


def rounds_on(world: int) -> bool:
    """Whether a restart on so many ranks may change the order of a sum."""
    return world >= _MANY


def rounded_from(history: History) -> int | None:
    """The first global step from which on values may differ from the twin's by ROUNDING. None: all bits must be
    equal."""
    many = {attempt.number for attempt in history.attempts[1:] if rounds_on(attempt.world_size)}
    steps = history.by_step().executions
    first = steps.global_step[np.isin(steps.attempt, list(many))]
    return int(first.min()) if len(first) else None


def rounding(history: History, step: int | None) -> float:
    """The relative difference that a value may have after this global step; 0: its bits must be equal."""
    first = rounded_from(history)
    return ROUNDING if first is not None and step is not None and step >= first else 0.0


def may_be_rounding(found: Mapping[int, float], history: History) -> bool | None:
    """Whether differences of losses may be rounding. `found`: relative differences by global step.

    True: they are at most ROUNDING. False: they are larger, and may be rounding that has grown. None: they can't be
    rounding, because bits must be equal in that step, or because a large difference did not grow from smaller ones. In
    the first step after a restart, losses are computed before gradients are summed, so a large difference there is not
    rounding."""
    first, largest, sure = rounded_from(history), ROUNDING, True
    for step, far in sorted(found.items()):
        if far > 0 and (first is None or step < first):
            return None
        if far > ROUNDING:
            sure = False
            if step == first or far > max(LOW_PRECISION, _GROWTH * largest):
                return None
        largest = max(largest, far)
    return sure


def but_for_rounding(largest: float, history: History) -> str:
    """A phrase about the rounding, for the reason of an assertion that passes. `largest`: the largest relative
    difference of the run."""
    return (
        f"equal except for rounding, at most {largest:.1g}, from step {rounded_from(history)} on: after a restart, "
        "three or more ranks sum in another order"
    )
