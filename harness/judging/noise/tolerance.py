"""By how much a run may differ from its twins, for each quantity and each step.

If the twins are bitwise equal, the run must be bitwise equal to them. If they differ among themselves, no run can equal
them bit by bit, and the tolerance is learned from the twins:

- A difference is relative to the value, or to the typical size of the quantity (the median over the run) if the value
  is smaller: near zero, a relative difference says nothing.
- The *spread* in a step is the largest difference between any two twins in this step and the NEAR steps before and
  after it. There are few twins, and in a single step they may be close by chance.
- A run is equal if it is within LEARNED_FACTOR spreads of the nearest twin. It is different if it is beyond CERTAIN
  spreads in several steps. A difference between the two limits may be chance.
- If LEARNED_FACTOR spreads are more than CAP, the twins are too noisy to judge a run. A lost optimizer state often
  changes a loss by no more than one per cent, and a larger tolerance would excuse it.
- Nothing is learned from values that are not finite, and their step can't be judged.
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
NEAR = 2  # steps before and after a step whose differences count for its spread
_ENOUGH = 3  # steps that must be beyond CERTAIN: a single step may be a spike that the twins have in another step


@dataclass(frozen=True)
class Tolerance:
    """The difference that a run may have from its twins in one quantity. All differences are relative."""

    basis: Literal["given", "bitwise", "learned"] = "bitwise"
    given: float = 0.0
    typical: float = 0.0  # typical size of the quantity, in its own unit
    spreads: Mapping[int, float] = field(default_factory=dict)  # by step; infinite: a twin's value is not finite

    def allowed(self, step: int, factor: float = LEARNED_FACTOR) -> float:
        """The relative difference that a run may have in this step. Infinite if the twins show nothing about this
        step."""
        return factor * self.spreads.get(step, math.inf) if self.basis == "learned" else self.given

    def judges(self, step: int) -> bool:
        """Whether the twins are similar enough in this step to judge a run."""
        return self.basis != "learned" or self.allowed(step) <= CAP

    @property
    def largest(self) -> float:
        """The largest allowed difference of all steps that can be judged."""
        return max((self.allowed(step) for step in self.spreads if self.judges(step)), default=self.given)


@dataclass(frozen=True)
class Tolerances:
    """The tolerances of the loss and of the learning rate."""

    loss: Tolerance
    rate: Tolerance

    @classmethod
    def given(cls, tolerance: float, typical: float = 0.0) -> Tolerances:
        """The tolerance that a scenario gives. `typical`: the typical loss."""
        return cls(Tolerance("given", tolerance, typical), Tolerance("given", max(RATE.floor, tolerance)))

    @classmethod
    def learned(cls, twins: Sequence[Steps], last: int | None = None) -> Tolerances:
        """The tolerances learned from twins. `last`: use only the steps up to this global step. See `learned` below."""
        rate = learned(twins, RATE, last)
        bitwise = rate.basis == "bitwise"
        return cls(learned(twins, LOSS, last), Tolerance("given", RATE.floor) if bitwise else rate)


def learned(twins: Sequence[Steps], of: Quantity, last: int | None = None) -> Tolerance:
    """Learns the tolerance of the quantity `of` from twins.

    `last`: use only the steps up to this global step, so that noise in later steps does not hide a difference in
    earlier steps. The typical size is always that of all steps."""
    size = of.typical(twins)
    common = sorted(set(twins[0]).intersection(*twins[1:])) if len(twins) > 1 else []
    pairs = [of.distances(a, b, size) for a, b in combinations(twins, 2)]
    apart = {step: max(far[step] for far in pairs) for step in common}
    if not any(apart.values()):
        return Tolerance(typical=size)
    early = {step: far for step, far in apart.items() if last is None or step <= last}
    return Tolerance("learned", 0.0, size, {step: _spread(early, step, of.floor) for step in early})


def _spread(apart: Mapping[int, float], step: int, floor: float) -> float:
    if not math.isfinite(apart[step]):
        return math.inf
    near = (apart.get(other, 0.0) for other in range(step - NEAR, step + NEAR + 1))
    return max(floor, *(value for value in near if math.isfinite(value)))


def distances(ours: Steps, twins: Sequence[Steps], of: Quantity, typical: float) -> dict[int, float]:
    """The relative difference from the nearest twin, in each step that the run and all twins have."""
    common = ours.keys() & set(twins[0]).intersection(*twins[1:])
    found = [of.distances(ours, twin, typical) for twin in twins]
    return {step: min(far[step] for far in found) for step in sorted(common)}


def certainly_beyond(found: Mapping[int, float], tolerance: Tolerance) -> int | None:
    """The first step from which on a run certainly differs from its twins: at least three steps are beyond CERTAIN
    spreads, and at least half of all steps from there on are beyond the allowed difference. None if there is no such
    step. `found`: relative differences by step."""
    judged = [step for step in sorted(found) if math.isfinite(tolerance.allowed(step))]
    beyond = [step for step in judged if found[step] > tolerance.allowed(step, CERTAIN)]
    for step in beyond[: 1 - _ENOUGH]:
        rest = [later for later in judged if later >= step]
        if 2 * sum(found[later] > tolerance.allowed(later) for later in rest) >= len(rest):
            return step
    return None
