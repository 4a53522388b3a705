"""What of a step can be compared with a twin's, and how far apart two values of it are. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torchaos.harness.record.history import Execution

Steps = Mapping[int, Mapping[int, Execution]]  # by global step, then rank
Values = Sequence[float | None]


def relative(a: float, b: float, typical: float = 0.0) -> float:
    """|a - b| / max(|a|, |b|, typical): 0 for equal values, two NaN included; infinite where only one is finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), typical)


def _largest(ours: Values, theirs: Values, typical: float) -> float:
    """Infinite where one has more values than the other; what was not seen is left out."""
    if len(ours) != len(theirs):
        return math.inf
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return max((relative(a, b, typical) for a, b in pairs), default=0.0)


def _of_sketches(ours: Values, theirs: Values, typical: float) -> float:
    """The norm of the difference between two sets of parameters relative to their norm, estimated from their sketches
    (agent/state.py): each of its sums differs by the norm of the difference, times a random number of variance 1."""
    mine, twins = ([math.nan if one is None else one for one in values] for values in (ours, theirs))
    if len(mine) != len(twins) or len(mine) < 2:
        return math.inf if mine or twins else 0.0
    if mine == twins:
        return 0.0
    far = math.dist(mine[1:], twins[1:]) / math.sqrt(len(mine) - 1)
    return far / max(mine[0], twins[0]) if math.isfinite(far) and max(mine[0], twins[0]) > 0 else math.inf


@dataclass(frozen=True)
class Quantity:
    name: str
    read: Callable[[Execution], Values]
    apart: Callable[[Values, Values, float], float]  # the third is the typical size
    floor: float  # relative: the least difference between two runs that are not bitwise equal

    def typical(self, runs: Sequence[Steps]) -> float:
        """The median size of its values that are finite."""
        ranks = (one for steps in runs for by_rank in steps.values() for one in by_rank.values())
        sizes = [abs(value) for one in ranks for value in self.read(one) if value is not None and math.isfinite(value)]
        return median(sizes) if sizes else 0.0

    def distance(self, ours: Mapping[int, Execution], theirs: Mapping[int, Execution], typical: float) -> float:
        """On the rank where it is largest, of those that both have."""
        common = ours.keys() & theirs.keys()
        return max((self.apart(self.read(ours[r]), self.read(theirs[r]), typical) for r in common), default=0.0)


_FLOAT32 = 2e-7  # some three of its last bits
LOSS = Quantity("loss", lambda one: one.losses, _largest, _FLOAT32)
RATE = Quantity("learning rate", lambda one: one.lr, _largest, 1e-9)  # computed in closed form, or step by step
WEIGHTS = Quantity("parameters", lambda one: one.sketch, _of_sketches, 3e-8)  # half of a last bit in each
