"""Finds out how a run's parameters move away from those of its twin: at once because of a defect, or slowly by
rounding. It uses the sketches of the parameters (agent/state.py).

The distance that a step adds is measured in units of the twin's own update in that step. Rounding of sums adds about a
millionth of an update. A lost optimizer state leads to a different update, and adds most of an update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from torchaos.harness.judging.noise.quantities import WEIGHTS, Steps
from torchaos.harness.record.history import History

LIKE = 1e-3  # in updates: rounding adds at most this to the distance from the twin in a step
OTHER = 0.03  # in updates: a step that adds more made another update, even if gradients are summed in bfloat16
PUT_BACK = 3e-7  # relative to the norm: loaded parameters may be off by the last bit of a float32
_GROWTH = 100.0  # a distance that grew by more than this factor in a step did not grow by rounding


@dataclass(frozen=True)
class Loaded:
    """The parameters of a rank at the begin of an attempt, compared with its parameters after the same step in an
    earlier attempt."""

    attempt: int
    step: int  # the global step from which the attempt resumed
    rank: int
    off: float  # distance, relative to the norm; 0: bitwise equal; infinite: different by an unknown distance


def loaded(history: History) -> Iterator[Loaded]:
    """Yields a comparison for each rank and each resume, if the number of ranks did not change and both states were
    seen. No twin is needed, and noise can't explain a difference, because a checkpoint holds the exact bits."""
    bases = [attempt.base for attempt in history.attempts if attempt.base]
    near = np.isin(history.executions.global_step, [step for base in bases for step in (base, base + 1)])
    placed = {(done.attempt, done.global_step, done.rank): done for done in history.executions.at(near)}
    for before, attempt in zip(history.attempts, history.attempts[1:], strict=False):
        if not attempt.base or before.world_size != attempt.world_size:
            continue
        for rank in range(attempt.world_size):
            earlier = (placed.get((old.number, attempt.base, rank)) for old in reversed(history.attempts))
            saved = next((done for done in earlier if done and done.attempt < attempt.number), None)
            begun = placed.get((attempt.number, attempt.base + 1, rank))
            if saved and begun and saved.parameters and begun.restored:
                far = WEIGHTS.apart(begun.restored_sketch, saved.sketch, 0.0) or math.inf
                # A job may change its parameters before it saves them, and continue with the changed parameters.
                nexts = (placed.get((saved.attempt, attempt.base + 1, other)) for other in range(attempt.world_size))
                had = {saved.parameters, *(done.restored for done in nexts if done)}
                off = 0.0 if begun.restored in had else far
                yield Loaded(attempt.number, attempt.base, rank, off)


@dataclass(frozen=True)
class Drift:
    """How far the parameters of a run moved away from the twin's."""

    farthest: float  # largest distance from the twin, relative to the norm
    other: int | None  # the first global step that made another update
    unclear: int | None  # the first step that added more than rounding adds, and less than another update adds


def drift(ours: Steps, theirs: Steps) -> Drift | None:
    """The drift from a twin whose steps are bitwise reproducible. None if not all common steps have sketches."""
    common = sorted(step for step in ours.keys() & theirs.keys() if ours[step].keys() == theirs[step].keys())
    far = {step: WEIGHTS.distance(ours[step], theirs[step], 0.0) for step in common}
    if not common or not all(
        execution.sketch for step in common for execution in (*ours[step].values(), *theirs[step].values())
    ):
        return None
    other = unclear = None
    for step in common:
        before = far.get(step - 1, 0.0)
        update = WEIGHTS.distance(theirs[step], theirs[step - 1], 0.0) if step - 1 in theirs else 1.0
        added = far[step] - before
        if added > OTHER * update and far[step] > _GROWTH * before:
            other = step if other is None else other
        elif added > LIKE * update:
            unclear = step if unclear is None else unclear
    return Drift(max(far.values()), other, unclear)
