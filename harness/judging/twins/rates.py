"""Says in words how the learning rates of a run differ from its twin's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchaos.harness.judging.checkpoints.resumes import resumed_in_words
from torchaos.harness.judging.claims import said
from torchaos.harness.judging.noise.quantities import RATE, Steps, relative
from torchaos.harness.record.history import Execution, History

_ROUNDING = RATE.floor
_FEW = 4  # so many steps are needed to find a shift of the schedule


@dataclass(frozen=True)
class Differing:
    step: int
    rank: int
    group: int
    ours: float | None
    theirs: float | None

    @property
    def relative(self) -> float:
        return 1.0 if self.ours is None or self.theirs is None else relative(self.ours, self.theirs)


def story(history: History, ours: Steps, theirs: Steps, first: Differing) -> str:
    """A sentence that says how the schedule is wrong from the first different rate on."""
    of = ours[first.step][first.rank]
    resumed = resumed_in_words(history, of)
    mine = {step: _rate(by_rank, first) for step, by_rank in ours.items()}
    twins = {step: _rate(by_rank, first) for step, by_rank in theirs.items()}
    own = [step for step in sorted(ours) if _is_with(of, ours[step].get(first.rank))]
    later = [step for step in own if step >= first.step]
    change = next((count for count, step in enumerate(later) if mine[step] != first.ours), None)
    if change is None and _near(mine.get(first.step - 1), first.ours) and len({twins.get(step) for step in later}) == 1:
        return said("rate kept", resumed=resumed)
    window = later[: max(_FEW, (change or 0) + 1)]  # a rate that stays the same would fit many shifts
    since_the_resume = [step for step in own if step <= window[-1]]
    if len(window) > 1 and len({mine[step] for step in since_the_resume}) == 1:
        return said("rate constant", rate=first.ours, resumed=resumed)
    shift = _shift(mine, twins, since_the_resume) or _shift(mine, twins, window)
    if shift is None:
        return said("rates other", resumed=resumed)
    if window[0] + shift == min(twins):
        return said("rates anew", step=min(twins), resumed=resumed)
    steps = "one step" if abs(shift) == 1 else f"{abs(shift)} steps"
    if shift > 0:
        return said("rates ahead", steps=steps, resumed=resumed)
    return said("rates one behind" if shift == -1 else "rates behind", steps=steps, resumed=resumed)


def _shift(mine: Mapping[int, float | None], twins: Mapping[int, float | None], window: Sequence[int]) -> int | None:
    """The smallest number of steps by which the rates are shifted; None if no shift explains them."""
    shifts = sorted((other - window[0] for other in twins if other != window[0]), key=abs)
    return next((by for by in shifts if all(_near(mine[step], twins.get(step + by)) for step in window)), None)


def _near(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and relative(one, other) <= _ROUNDING


def _rate(by_rank: Mapping[int, Execution], first: Differing) -> float | None:
    one = by_rank.get(first.rank) or next(iter(by_rank.values()))
    return one.lr[first.group] if first.group < len(one.lr) else None


def _is_with(step: Execution, other: Execution | None) -> bool:
    """Whether both steps are of the same attempt, without a rollback in between."""
    return other is not None and (step.attempt, step.segment) == (other.attempt, other.segment)
