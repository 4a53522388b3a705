"""By how much two healthy runs of a job may differ, for each quantity and each step.

**Rounding.** All assertions use this rule: for losses, parameters, checkpoints, and samples that the job computes from
its parameters (comparison/sample_reasons.py). With three ranks or more, DDP sums gradients in another order after any
restart: it rebuilds its buckets after the first step of a process, so the first step after a restart has other buckets
than the same step of the twin. The sums then differ in their last bits, and training makes the difference grow. Two
ranks have only one order, because a + b = b + a.

So bits must be equal before the first restart, and always on two ranks. On three ranks or more, a value that was
computed after a restart counts as equal if its relative difference is at most ROUNDING. With
`find_unused_parameters=True`, DDP does not rebuild its buckets, and FSDP has no buckets. Such jobs are bitwise equal,
and an assertion says so.

**Drift.** The sketches of the parameters (agent/state/state_check_sums.py) show how a run's parameters move away from
those of its twin: at once because of a defect, or slowly by rounding. The distance that a step adds is measured in
units of the twin's own update in that step. Rounding of sums adds about a millionth of an update. A lost optimizer
state leads to a different update, and adds most of an update.

**Noise.** If the twins are bitwise equal, the run must be bitwise equal to them. If they differ among themselves, no
run can equal them bit by bit, and the tolerance is learned from the twins:

- A difference is relative to the value, or to the typical size of the quantity (the median over the run) if the value
  is smaller: near zero, a relative difference says nothing.
- The *spread* in a step is the largest difference between any two twins in this step and the NEAR steps before and
  after it. There are few twins, and in a single step they may be close by chance.
- A run is equal if it is within LEARNED_FACTOR spreads of the nearest twin. It is different if it is beyond CERTAIN
  spreads in several steps. A difference between the two limits may be chance.
- If LEARNED_FACTOR spreads are more than CAP, the twins are too noisy to judge a run. A lost optimizer state often
  changes a loss by no more than one per cent, and a larger tolerance would excuse it.
- Nothing is learned from values that are not finite, and their step can't be judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Literal

import numpy as np

from torchaos.harness.record.history import Execution, History, StepTable
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
    (agent/state/state_check_sums.py). Each sum of a sketch differs by the norm of the difference times a random number
    of variance 1."""
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


_FLOAT32 = 2e-7  # about three units in the last place of a float32
LOSS = Quantity("loss", lambda execution: execution.losses, _largest, _FLOAT32, "losses")
RATE = Quantity("learning rate", lambda execution: execution.lr, _largest, 1e-9, "lr")  # closed form, or step by step
WEIGHTS = Quantity(
    "parameters", lambda execution: execution.sketch, _of_sketches, 3e-8
)  # half of the last bit of each parameter


ROUNDING = 1e-5  # relative: float32 sums differ by about 1e-7 at first, which stays below this for about 100 steps
LOW_PRECISION = 2**-7  # relative: the last bit of a bfloat16
_ROUNDING_GROWTH = 100.0  # the largest factor by which rounding may grow from a step to the next
_MANY = 3  # the fewest ranks for which a sum has several orders


def rounds_on(world: int) -> bool:
    """Whether a restart on so many ranks may change the order of a sum."""
    return world >= _MANY


def _other_order(history: History) -> set[int]:
    """The attempts that may sum in another order than the first attempt: those of three ranks or more, and those that
    returned to the first number of ranks after another number."""
    size = history.attempts[0].world_size if history.attempts else 0
    other = next((attempt.number for attempt in history.attempts if attempt.world_size != size), math.inf)
    return {
        attempt.number
        for attempt in history.attempts[1:]
        if rounds_on(attempt.world_size) or (attempt.world_size == size and attempt.number > other)
    }


def rounded_from(history: History) -> int | None:
    """The first global step from which on values may differ from the twin's by ROUNDING. None: all bits must be
    equal."""
    steps = history.by_step().executions
    first = steps.global_step[np.isin(steps.attempt, list(_other_order(history)))]
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
            if step == first or far > max(LOW_PRECISION, _ROUNDING_GROWTH * largest):
                return None
        largest = max(largest, far)
    return sure


def _of_many(history: History) -> bool:
    return any(rounds_on(attempt.world_size) for attempt in history.attempts[1:])


def but_for_rounding(largest: float, history: History) -> str:
    """A phrase about the rounding, for the reason of an assertion that passes. `largest`: the largest relative
    difference of the run."""
    who = "three or more ranks" if _of_many(history) else "another number of ranks"
    since = f"from step {rounded_from(history)} on"
    return f"equal except for rounding, at most {largest:.1g}, {since}: after a restart, {who} sum in another order"


LIKE = 1e-3  # in updates: in one step, rounding adds at most this to the distance from the twin
OTHER = 0.03  # in updates: a step that adds more made another update, even if gradients are summed in bfloat16
PUT_BACK = 3e-7  # relative to the norm: loaded parameters may be off by the last bit of a float32
_DRIFT_GROWTH = 100.0  # a distance that grew by more than this factor in a step did not grow by rounding


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
    unclear: int | None  # the first step that added more than rounding can add, and less than another update would


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
        if added > OTHER * update and far[step] > _DRIFT_GROWTH * before:
            other = step if other is None else other
        elif added > LIKE * update:
            unclear = step if unclear is None else unclear
    return Drift(max(far.values()), other, unclear)


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
    """The first step from which on a run certainly differs from its twins: from there on, at least three steps are
    beyond CERTAIN spreads, and at least half of all steps are beyond the allowed difference. None if there is no such
    step. `found`: relative differences by step."""
    judged = [step for step in sorted(found) if math.isfinite(tolerance.allowed(step))]
    beyond = [step for step in judged if found[step] > tolerance.allowed(step, CERTAIN)]
    for step in beyond[: 1 - _ENOUGH]:
        rest = [later for later in judged if later >= step]
        if 2 * sum(found[later] > tolerance.allowed(later) for later in rest) >= len(rest):
            return step
    return None
