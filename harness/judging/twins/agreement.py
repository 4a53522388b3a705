"""Where two runs of one job differ in what they computed: losses and learning rates, step by step and rank by rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchaos.harness.judging.checkpoints.clashes import clashes
from torchaos.harness.judging.checkpoints.contents import checkpoints_of
from torchaos.harness.judging.ending.teardown import final_step
from torchaos.harness.judging.noise.quantities import Steps, relative
from torchaos.harness.judging.noise.tolerance import LEARNED_FACTOR, Tolerance, Tolerances
from torchaos.harness.judging.replicas import absences
from torchaos.harness.record.history import Execution, History
from torchaos.harness.record.record import Record
from torchaos.harness.record.replicas import records_of

ENOUGH = 3  # twins to learn from
OTHER_WORLD = 0.01  # relative: least tolerance for means over another number of ranks, whose sums are in another order


@dataclass(frozen=True)
class Difference:
    what: str  # loss, learning rate
    step: int
    rank: int | None  # None: the mean over the ranks
    ours: float | None
    theirs: float | None
    relative: float


def history_of(run: Record, twins: Sequence[Record]) -> History:
    """The run's history; the twin is asked to help only where the run's own witnesses can't place an attempt."""
    return History.of(run.events, twins[0].history) if twins and run.history.unplaced else run.history


def until(steps: Steps, last: int | None) -> Steps:
    return steps if last is None else {step: by_rank for step, by_rank in steps.items() if step <= last}


def before(history: History, at_s: float) -> Steps:
    """What had been executed before a moment, whether it counts in the end or not. A step that some rank was still in
    is left out: the mean over the others is no measure."""
    found: dict[int, dict[int, Execution]] = {}
    for one in history.executions:
        if one.mono_s < at_s and one.global_step is not None:
            found.setdefault(one.global_step, {})[one.rank] = one
    tell = len({one.rank for one in history.executions})  # a log tells of one rank
    ranks = {attempt.number: min(attempt.world_size, tell) for attempt in history.attempts}
    return {
        step: by_rank
        for step, by_rank in sorted(found.items())
        if len(by_rank) >= max(ranks.get(one.attempt, 0) for one in by_rank.values())
    }


def untold(history: History, ours: Steps, other: History, theirs: Steps) -> set[int]:
    """Steps, of those that both have, of which a rank that was there told nothing: its agent had stepped aside, or it
    died of the fault at the very end of a step that counts. No mean and no sum over the others is a measure."""
    return {
        step
        for step in ours.keys() & theirs.keys()
        if (
            ours[step].keys() != theirs[step].keys()
            if _world(history, ours[step]) == _world(other, theirs[step])
            else _is_partial(history, ours[step]) or _is_partial(other, theirs[step])
        )
    }


def uneven(twin: Steps) -> str | None:
    """What to say of ranks that make different numbers of steps when nothing goes wrong, as under DDP's Join: their
    steps have no common count, and which of its own steps a rank went on from is not known."""
    ranks = {rank for by_rank in twin.values() for rank in by_rank}
    made = {rank: sum(rank in by_rank for by_rank in twin.values()) for rank in sorted(ranks)}
    if len(set(made.values())) < 2:
        return None
    told = " and ".join(f"{count} (rank {rank})" for rank, count in list(made.items())[:2])
    return f"the ranks make different numbers of steps in the twin too, {told}, so that steps have no common count"


def _world(history: History, by_rank: Mapping[int, Execution]) -> int:
    numbers = {one.attempt for one in by_rank.values()}
    return max((attempt.world_size for attempt in history.attempts if attempt.number in numbers), default=0)


def _is_partial(history: History, by_rank: Mapping[int, Execution]) -> bool:
    tell = len({one.rank for one in history.executions})  # a log tells of one rank
    return len(by_rank) < min(_world(history, by_rank), tell)


def differences(
    ours: Steps, theirs: Steps, allowed: float | Tolerances, other_world: float = OTHER_WORLD,
    factor: float = LEARNED_FACTOR,
) -> Iterator[Difference]:  # fmt: skip
    """In order of step; only steps that both have, and only what both could see. `factor`: how many spreads are allowed
    where the tolerance was learned."""
    limits = allowed if isinstance(allowed, Tolerances) else Tolerances.given(allowed)
    for step in sorted(ours.keys() & theirs.keys()):
        one, other = ours[step], theirs[step]
        if one.keys() == other.keys():
            for rank in sorted(one):
                yield from _of_rank(step, rank, one[rank], other[rank], limits, factor)
        else:
            yield from _of_mean(step, one, other, limits.loss, max(limits.loss.allowed(step, factor), other_world))


def agree(run: Record, twins: Sequence[Record]) -> bool:
    """Whether the run is bitwise what the first twin is, as far as can be seen: losses, rates, checkpoints."""
    twin = twins[0]
    theirs = twin.history.by_step()
    ours = until(history_of(run, twins).by_step(), final_step(twin))
    if next(differences(ours, until(theirs, final_step(twin)), 0.0), None):
        return False
    return not clashes(checkpoints_of(run) or [], checkpoints_of(twin) or [])


def wants_more(run: Record, twins: Sequence[Record]) -> bool:
    """Whether another twin would tell more: the run differs from the only one, or the twins differ among themselves."""
    if absences(records_of(run)):  # of replicas: nothing is compared with a twin that a second one could tell more of
        return not twins
    if len(twins) < 2:
        return not twins or not agree(run, twins)
    return len(twins) < ENOUGH and not all(agree(twin, [twins[0]]) for twin in twins[1:])


def _of_rank(
    step: int, rank: int, one: Execution, other: Execution, limits: Tolerances, factor: float
) -> Iterator[Difference]:
    for ours, theirs in zip(one.lr, other.lr, strict=False):
        if relative(ours, theirs) > limits.rate.allowed(step, factor):
            yield Difference("learning rate", step, rank, ours, theirs, relative(ours, theirs))
            break
    if not (one.loss_seen and other.loss_seen):
        return
    if len(one.losses) != len(other.losses):
        yield Difference("number of losses", step, rank, len(one.losses), len(other.losses), math.inf)
        return
    for mine, twins in zip(one.losses, other.losses, strict=True):
        mine, twins = mine or 0.0, twins or 0.0
        if relative(mine, twins, limits.loss.typical) > limits.loss.allowed(step, factor):
            yield Difference("loss", step, rank, mine, twins, relative(mine, twins))
            return


def _of_mean(
    step: int, one: Mapping[int, Execution], other: Mapping[int, Execution], loss: Tolerance, allowed: float
) -> Iterator[Difference]:
    ours, theirs = _mean(one), _mean(other)
    if ours is not None and theirs is not None and relative(ours, theirs, loss.typical) > allowed:
        yield Difference("loss", step, None, ours, theirs, relative(ours, theirs))


def _mean(by_rank: Mapping[int, Execution]) -> float | None:
    losses = [loss for one in by_rank.values() for loss in one.losses]
    seen = [loss for loss in losses if loss is not None]
    return sum(seen) / len(seen) if seen and len(seen) == len(losses) else None
