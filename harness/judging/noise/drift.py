"""How a run's parameters leave the path of its twin: at once by a defect, or slowly by rounding. From their sketches
(agent/state.py). Pure.

What a step adds to the distance from the twin is measured in the length of the twin's own update of that step. Rounding
of sums adds a millionth of it. A lost optimizer state makes another update: it adds most of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torchaos.harness.judging.noise.quantities import WEIGHTS, Steps
from torchaos.harness.record.history import History

LIKE = 1e-3  # of an update: what rounding adds to the distance from the twin in a step, at most
OTHER = 0.03  # of an update: more is another update, even where gradients are summed in bfloat16
PUT_BACK = 3e-7  # relative to the norm: parameters that are loaded may be off by a last bit of a float32
_GROWTH = 100.0  # a larger distance than so many times that of the step before did not grow out of it


@dataclass(frozen=True)
class Loaded:
    """What a rank began an attempt with, against what it had when that step was over the first time."""

    attempt: int
    step: int  # global, after which it went on
    rank: int
    off: float  # relative to the norm; 0: equal in all bits; infinite: not known by how much


def loaded(history: History) -> Iterator[Loaded]:
    """Of each resume on as many ranks as before, where both were seen. This needs no twin, and noise is no excuse: a
    checkpoint holds the very bits."""
    placed = {(one.attempt, one.global_step, one.rank): one for one in history.executions}
    for before, attempt in zip(history.attempts, history.attempts[1:], strict=False):
        if not attempt.base or before.world_size != attempt.world_size:
            continue
        for rank in range(attempt.world_size):
            earlier = (placed.get((one.number, attempt.base, rank)) for one in reversed(history.attempts))
            saved = next((one for one in earlier if one and one.attempt < attempt.number), None)
            begun = placed.get((attempt.number, attempt.base + 1, rank))
            if saved and begun and saved.parameters and begun.restored:
                far = WEIGHTS.apart(begun.restored_sketch, saved.sketch, 0.0) or math.inf
                off = 0.0 if saved.parameters == begun.restored else far
                yield Loaded(attempt.number, attempt.base, rank, off)


@dataclass(frozen=True)
class Drift:
    farthest: float  # from the twin, relative to the norm
    other: int | None  # the first step that made another update
    unclear: int | None  # the first that added more than rounding does, and less than another update


def drift(ours: Steps, theirs: Steps) -> Drift | None:
    """From a twin whose steps are bitwise reproducible; None where there are no sketches."""
    common = sorted(step for step in ours.keys() & theirs.keys() if ours[step].keys() == theirs[step].keys())
    far = {step: WEIGHTS.distance(ours[step], theirs[step], 0.0) for step in common}
    if not common or not all(one.sketch for step in common for one in (*ours[step].values(), *theirs[step].values())):
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
