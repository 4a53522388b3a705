"""The quantities of a step that can be compared with a twin's, and how the difference of two values is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from torchaos.harness.record.history import Execution, StepTable
from torchaos.harness.record.steps import Both

Steps = Mapping[int, Mapping[int, Execution]]  # by global step, then rank
Values = Sequence[float | None]


def relative(a: float, b: float, typical: float = 0.0) -> float:
    """|a - b| / max(|a|, |b|, typical). 0 if both are equal or both NaN; infinite for other values that are not
    finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), typical)


def _largest(ours: Values, theirs: Values, typical: float) -> float:
    """The largest relative difference of two lists of values; infinite if their lengths differ. Values that were not
    seen (None) are left out."""
    if len(ours) != len(theirs):
        return math.inf
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return max((relative(a, b, typical) for a, b in pairs), default=0.0)


def _of_sketches(ours: Values, theirs: Values, typical: float) -> float:
    """The norm of the difference of two sets of parameters, relative to the larger norm, estimated from their sketches
    (agent/state.py). Each sum of a sketch differs by the norm of the difference times a random number of variance 1."""
    mine, twins = ([math.nan if x is None else x for x in values] for values in (ours, theirs))
    if len(mine) != len(twins) or len(mine) < 2:
        return math.inf if mine or twins else 0.0
    if mine == twins:
        return 0.0
    far = math.dist(mine[1:], twins[1:]) / math.sqrt(len(mine) - 1)
    return far / max(mine[0], twins[0]) if math.isfinite(far) and max(mine[0], twins[0]) > 0 else math.inf


@dataclass(frozen=True)
class Quantity:
    """A quantity of a step, such as the loss, and how two of its values are compared."""

    name: str
    read: Callable[[Execution], Values]
    apart: Callable[[Values, Values, float], float]  # the relative difference; third argument: the typical size
    floor: float  # relative: the smallest tolerance for runs that are not bitwise equal
    column: str = ""  # a column with all values, if there is such a column; then `apart` is `_largest`

    def typical(self, runs: Sequence[Steps]) -> float:
        """The median absolute value over all steps and ranks of these runs; values that are not finite are left out."""
        if self.column:
            values = [StepTable.of(steps).executions.column(self.column).ravel() for steps in runs]
            finite = np.abs(np.concatenate([np.zeros(0), *values]))
            finite = finite[np.isfinite(finite)]
            return float(np.median(finite)) if len(finite) else 0.0
        ranks = (execution for steps in runs for by_rank in steps.values() for execution in by_rank.values())
        sizes = [
            abs(value)
            for execution in ranks
            for value in self.read(execution)
            if value is not None and math.isfinite(value)
        ]
        return median(sizes) if sizes else 0.0

    def distances(self, ours: Steps, theirs: Steps, typical: float) -> dict[int, float]:
        """The largest relative difference over the ranks that both runs have, in each step that both have."""
        if not self.column:
            common = sorted(ours.keys() & theirs.keys())
            return {step: self.distance(ours[step], theirs[step], typical) for step in common}
        mine, twins = StepTable.of(ours), StepTable.of(theirs)
        both = Both.of(mine, twins)
        found = dict(zip(both.ours, both.farthest(self.column, typical).tolist(), strict=True))
        return found | {step: self.distance(mine[step], twins[step], typical) for step in both.apart.tolist()}

    def distance(self, ours: Mapping[int, Execution], theirs: Mapping[int, Execution], typical: float) -> float:
        """The largest relative difference over the ranks that both runs have in a step."""
        common = ours.keys() & theirs.keys()
        return max((self.apart(self.read(ours[r]), self.read(theirs[r]), typical) for r in common), default=0.0)


_FLOAT32 = 2e-7  # about three units in the last place
LOSS = Quantity("loss", lambda execution: execution.losses, _largest, _FLOAT32, "losses")
RATE = Quantity("learning rate", lambda execution: execution.lr, _largest, 1e-9, "lr")  # closed form, or step by step
WEIGHTS = Quantity(
    "parameters", lambda execution: execution.sketch, _of_sketches, 3e-8
)  # half of the last bit in each parameter
