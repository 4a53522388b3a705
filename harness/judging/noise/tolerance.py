"""How far a run may be from its twins, for each quantity and each step. Pure.

Where the twins are bitwise equal, the run must be so too. Where they differ among themselves, no run can be asked to
equal one of them bit by bit, and the tolerance is learned from them:

- A difference is relative to the value, and to the typical size of the quantity (the median over the run) where the
  value is smaller: near zero, a relative difference says nothing.
- The *spread* in a step is the largest difference of any two twins in it and in the NEAR steps around it. Twins are
  few, and may be near each other in one step by chance.
- Within LEARNED_FACTOR spreads of the nearest twin a run is equal. Beyond CERTAIN spreads, in several steps, it is not.
  What lies between may be chance.
- Where LEARNED_FACTOR spreads are more than CAP, the twins are too noisy to judge a run by. The effect of a lost
  optimizer state on a loss is often no more than one per cent: a larger tolerance would excuse it.
- Values that are not finite teach nothing, and the step of such a value can't be judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from torchaos.harness.judging.noise.quantities import LOSS, RATE, Quantity, Steps

LEARNED_FACTOR, CERTAIN = 3.0, 10.0  # spreads
CAP = 0.01  # relative
NEAR = 2  # steps before and after that a spread is taken from
_ENOUGH = 3  # steps that must be beyond CERTAIN: one alone may be a spike that the twins have elsewhere


@dataclass(frozen=True)
class Tolerance:
    """Of one quantity. All values are relative."""

    basis: Literal["given", "bitwise", "learned"] = "bitwise"
    given: float = 0.0
    typical: float = 0.0  # size of the quantity
    spreads: Mapping[int, float] = field(default_factory=dict)  # by step; infinite: the twins' values teach nothing

    def allowed(self, step: int, factor: float = LEARNED_FACTOR) -> float:
        """The difference that a run may have in this step; infinite in one that the twins say nothing of."""
        return factor * self.spreads.get(step, math.inf) if self.basis == "learned" else self.given

    def judges(self, step: int) -> bool:
        return self.basis != "learned" or self.allowed(step) <= CAP

    @property
    def largest(self) -> float:
        """What was allowed at most in a step that can be judged."""
        return max((self.allowed(step) for step in self.spreads if self.judges(step)), default=self.given)


@dataclass(frozen=True)
class Tolerances:
    loss: Tolerance
    rate: Tolerance

    @classmethod
    def given(cls, tolerance: float, typical: float = 0.0) -> Tolerances:
        return cls(Tolerance("given", tolerance, typical), Tolerance("given", max(RATE.floor, tolerance)))

    @classmethod
    def learned(cls, twins: Sequence[Steps], last: int | None = None) -> Tolerances:
        """See the function."""
        rate = learned(twins, RATE, last)
        bitwise = rate.basis == "bitwise"
        return cls(learned(twins, LOSS, last), Tolerance("given", RATE.floor) if bitwise else rate)


def learned(twins: Sequence[Steps], of: Quantity, last: int | None = None) -> Tolerance:
    """From the steps up to `last` alone, where that is given: what comes later must not excuse what was before."""
    size = of.typical(twins)
    common = sorted(set(twins[0]).intersection(*twins[1:])) if len(twins) > 1 else []
    apart = {step: max(of.distance(a[step], b[step], size) for a, b in combinations(twins, 2)) for step in common}
    if not any(apart.values()):
        return Tolerance(typical=size)
    early = {step: far for step, far in apart.items() if last is None or step <= last}
    return Tolerance("learned", 0.0, size, {step: _spread(early, step, of.floor) for step in early})


def _spread(apart: Mapping[int, float], step: int, floor: float) -> float:
    if not math.isfinite(apart[step]):
        return math.inf
    near = (apart.get(other, 0.0) for other in range(step - NEAR, step + NEAR + 1))
    return max(floor, *(one for one in near if math.isfinite(one)))


def distances(ours: Steps, twins: Sequence[Steps], of: Quantity, typical: float) -> dict[int, float]:
    """From the nearest twin, in each step that all have."""
    common = ours.keys() & set(twins[0]).intersection(*twins[1:])
    return {step: min(of.distance(ours[step], one[step], typical) for one in twins) for step in sorted(common)}


def certainly_beyond(found: Mapping[int, float], tolerance: Tolerance) -> int | None:
    """The first step from which on a run is certainly not what its twins are: some steps are beyond CERTAIN spreads,
    and of all steps from there on at least half are beyond what is allowed."""
    judged = [step for step in sorted(found) if math.isfinite(tolerance.allowed(step))]
    beyond = [step for step in judged if found[step] > tolerance.allowed(step, CERTAIN)]
    for step in beyond[: 1 - _ENOUGH]:
        rest = [later for later in judged if later >= step]
        if 2 * sum(found[later] > tolerance.allowed(later) for later in rest) >= len(rest):
            return step
    return None
