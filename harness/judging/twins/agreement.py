"""Finds the steps in which two runs of a job differ in losses and learning rates, rank by rank."""

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
from torchaos.harness.judging.twins.midway import with_first_parts
from torchaos.harness.record.history import Execution, History
from torchaos.harness.record.record import Record
from torchaos.harness.record.replicas import records_of

ENOUGH = 3  # twins to learn from
OTHER_WORLD = 0.01  # relative: the least tolerance for means over another number of ranks, which sum in another order


@dataclass(frozen=True)
class Difference:
    what: str  # "loss", "learning rate" or "number of losses"
    step: int  # global
    rank: int | None  # None: the mean over the ranks
    ours: float | None
    theirs: float | None
    relative: float


def history_of(run: Record, twins: Sequence[Record]) -> History:
    """The run's history. The first twin helps in two cases: the run's own witnesses can't give global numbers to the
    steps of an attempt; or an attempt did only the rest of a step, whose first part the twin has."""
    if not twins:
        return run.history
    history = History.of(run.events, twins[0].history) if run.history.unplaced else run.history
    return with_first_parts(history, twins[0].history)


def until(steps: Steps, last: int | None) -> Steps:
    """The steps up to the global step `last`; all steps if it is None."""
    return steps if last is None else {step: by_rank for step, by_rank in steps.items() if step <= last}


def before(history: History, at_s: float) -> Steps:
    """The steps that were executed before `at_s` (CLOCK_MONOTONIC), whether or not they are in the final history. A
    step that not all ranks had finished is left out, because the mean over the other ranks can't be compared."""
    found: dict[int, dict[int, Execution]] = {}
    for execution in history.executions:
        if execution.mono_s < at_s and execution.global_step is not None:
            found.setdefault(execution.global_step, {})[execution.rank] = execution
    reporting = len({execution.rank for execution in history.executions})  # a log reports a single rank
    ranks = {attempt.number: min(attempt.world_size, reporting) for attempt in history.attempts}
    return {
        step: by_rank
        for step, by_rank in sorted(found.items())
        if len(by_rank) >= max(ranks.get(execution.attempt, 0) for execution in by_rank.values())
    }


def unreported(history: History, ours: Steps, other: History, theirs: Steps) -> set[int]:
    """The common steps that a rank of either run did not report, because an error had switched off its agent, or
    because the rank died of the fault at the very end of the step. A mean or sum over the other ranks can't be
    compared."""
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
    """A clause about a job whose ranks make different numbers of steps without a fault, as with DDP's Join. None for
    any other job. The steps of such ranks have no common count, so it is not known from which step a rank resumed."""
    ranks = {rank for by_rank in twin.values() for rank in by_rank}
    made = {rank: sum(rank in by_rank for by_rank in twin.values()) for rank in sorted(ranks)}
    if len(set(made.values())) < 2:
        return None
    counts = " and ".join(f"{count} (rank {rank})" for rank, count in list(made.items())[:2])
    return f"the ranks make different numbers of steps in the twin too, {counts}, so that steps have no common count"


def _world(history: History, by_rank: Mapping[int, Execution]) -> int:
    numbers = {execution.attempt for execution in by_rank.values()}
    return max((attempt.world_size for attempt in history.attempts if attempt.number in numbers), default=0)


def _is_partial(history: History, by_rank: Mapping[int, Execution]) -> bool:
    reporting = len({execution.rank for execution in history.executions})  # a log reports a single rank
    return len(by_rank) < min(_world(history, by_rank), reporting)


def differences(
    ours: Steps, theirs: Steps, allowed: float | Tolerances, other_world: float = OTHER_WORLD,
    factor: float = LEARNED_FACTOR,
) -> Iterator[Difference]:  # fmt: skip
    """Yields the differences in order of steps, only for steps that both runs have, and values that were seen in both.

    `allowed`: a relative tolerance, or tolerances by quantity. `other_world`: the least tolerance of the mean loss if
    the numbers of ranks differ. `factor`: the allowed number of spreads if the tolerance was learned."""
    limits = allowed if isinstance(allowed, Tolerances) else Tolerances.given(allowed)
    for step in sorted(ours.keys() & theirs.keys()):
        mine, twins = ours[step], theirs[step]
        if mine.keys() == twins.keys():
            for rank in sorted(mine):
                yield from _of_rank(step, rank, mine[rank], twins[rank], limits, factor)
        else:
            yield from _of_mean(step, mine, twins, limits.loss, max(limits.loss.allowed(step, factor), other_world))


def agree(run: Record, twins: Sequence[Record]) -> bool:
    """Whether losses, learning rates and checkpoints of the run are bitwise equal to those of the first twin. Values
    that were not seen in both are not compared."""
    twin = twins[0]
    theirs = twin.history.by_step()
    ours = until(history_of(run, twins).by_step(), final_step(twin))
    if next(differences(ours, until(theirs, final_step(twin)), 0.0), None):
        return False
    return not clashes(checkpoints_of(run) or [], checkpoints_of(twin) or [])


def wants_more(run: Record, twins: Sequence[Record]) -> bool:
    """Whether another twin would help to judge: the run differs from its only twin, or there are fewer than ENOUGH
    twins and they differ among themselves."""
    if absences(records_of(run)):  # steps without a replica are not compared with the twins, so a second can't help
        return not twins
    if len(twins) < 2:
        return not twins or not agree(run, twins)
    return len(twins) < ENOUGH and not all(agree(twin, [twins[0]]) for twin in twins[1:])


def _of_rank(
    step: int, rank: int, run: Execution, twin: Execution, limits: Tolerances, factor: float
) -> Iterator[Difference]:
    for ours, theirs in zip(run.lr, twin.lr, strict=False):
        if relative(ours, theirs) > limits.rate.allowed(step, factor):
            yield Difference("learning rate", step, rank, ours, theirs, relative(ours, theirs))
            break
    if not (run.loss_seen and twin.loss_seen):
        return
    if len(run.losses) != len(twin.losses):
        yield Difference("number of losses", step, rank, len(run.losses), len(twin.losses), math.inf)
        return
    for mine, other in zip(run.losses, twin.losses, strict=True):
        mine, other = mine or 0.0, other or 0.0
        if relative(mine, other, limits.loss.typical) > limits.loss.allowed(step, factor):
            yield Difference("loss", step, rank, mine, other, relative(mine, other))
            return


def _of_mean(
    step: int, run: Mapping[int, Execution], twin: Mapping[int, Execution], loss: Tolerance, allowed: float
) -> Iterator[Difference]:
    ours, theirs = _mean(run), _mean(twin)
    if ours is not None and theirs is not None and relative(ours, theirs, loss.typical) > allowed:
        yield Difference("loss", step, None, ours, theirs, relative(ours, theirs))


def _mean(by_rank: Mapping[int, Execution]) -> float | None:
    losses = [loss for execution in by_rank.values() for loss in execution.losses]
    seen = [loss for loss in losses if loss is not None]
    return sum(seen) / len(seen) if seen and len(seen) == len(losses) else None
