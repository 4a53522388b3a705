"""By how much a run may differ from its twin through rounding alone: one rule for all assertions. Pure.

With three ranks or more, DDP sums gradients in another order after any restart: it rebuilds its buckets after the first
step of a process, so the first step after a restart has other buckets than the same step of the twin. The sums then
differ in their last bits, and training makes the difference grow. Two ranks have only one order, because a + b = b + a.

So bits must be equal before the first restart, and always on two ranks. On three ranks or more, what was computed after
a restart is equal when its relative difference is at most ROUNDING. `find_unused_parameters=True` keeps DDP from
rebuilding its buckets; FSDP has none. Such jobs are bitwise equal, and an assertion says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchaos.harness.record.history import History

ROUNDING = 1e-5  # relative: sums in float32 differ by about 1e-7 at first; it grows to less than this in some 100 steps
LOW_PRECISION = 2**-7  # relative: the last bit of a bfloat16
_GROWTH = 100.0  # by which a difference may grow from one step to the next and still be the same one
_MANY = 3  # ranks, from which on a sum has several orders


def rounded_from(history: History) -> int | None:
    """The first global step whose values, and those of all later steps, may differ from the twin's by ROUNDING. None:
    all bits must be equal."""
    many = {one.number for one in history.attempts[1:] if one.world_size >= _MANY}
    return min((step for (step, _rank), one in history.counting().items() if one.attempt in many), default=None)


def rounding(history: History, step: int | None) -> float:
    """The relative difference that a value may have after this global step; 0: its bits must be equal."""
    first = rounded_from(history)
    return ROUNDING if first is not None and step is not None and step >= first else 0.0


def may_be_rounding(found: Mapping[int, float], history: History) -> bool | None:
    """Whether differences of losses (relative, by step) are rounding. True: they are at most ROUNDING. None: they can't
    be, since bits must be equal there, or a difference is too large and did not grow out of smaller ones. False: they
    may be. The first step after the restart computes its losses before anything is summed: none of them can be off."""
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
    """What to add to "equal" in the reason of an assertion that passes. `largest`: the largest relative difference."""
    return (
        f"equal but for rounding, at most {largest:.1g}, from step {rounded_from(history)} on: after a restart three "
        "ranks or more sum in another order"
    )
