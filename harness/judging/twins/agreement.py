"""Finds the steps in which two runs of a job differ in losses and learning rates, rank by rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.judging.checkpoints.clashes import clashes
from torchaos.harness.judging.checkpoints.contents import checkpoints_of
from torchaos.harness.judging.ending.teardown import final_step
from torchaos.harness.judging.noise.quantities import Steps, relative
from torchaos.harness.judging.noise.tolerance import LEARNED_FACTOR, Tolerance, Tolerances
from torchaos.harness.judging.replicas import absences
from torchaos.harness.judging.twins.midway import with_first_parts
from torchaos.harness.record.history import Execution, History, StepTable
from torchaos.harness.record.record import Record
from torchaos.harness.record.replicas import records_of
from torchaos.harness.record.steps import Both

Array = npt.NDArray[Any]

ENOUGH = 3  # twins to learn from
OTHER_WORLD = 0.01  # relative: the least tolerance for means over another number of ranks, which sum in another order


@dataclass(frozen=True)
class Difference:
    what: str  # "loss", "learning rate" or "number of losses"; "parameters": then the values are the gradient's norms
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


def until(steps: StepTable, last: int | None) -> StepTable:
    """The steps up to the global step `last`; all steps if it is None."""
    return steps.up_to(last)


def before(history: History, at_s: float) -> StepTable:
    """The steps that were executed before `at_s` (CLOCK_MONOTONIC), whether or not they are in the final history. A
    step that some rank had not finished is left out, because the mean over the other ranks can't be compared."""
    early = history.executions.placed
    found = StepTable(early.at(early.mono_s < at_s).last_of("global_step", "rank"))
    return found.only(found.counts >= _worlds(history, found, _reporting(history)))


def unreported(history: History, ours: StepTable, other: History, theirs: StepTable) -> set[int]:
    """The common steps that a rank of either run did not report, because an error had switched off its agent, or
    because the rank died of the fault at the very end of the step. A mean or sum over the other ranks can't be
    compared."""
    mine, twins = common(ours, theirs)
    alike = np.isin(mine.numbers, Both.of(mine, twins).ours.numbers)
    world, other_world = _worlds(history, mine), _worlds(other, twins)
    partial = mine.counts < np.minimum(world, _reporting(history))
    partial |= twins.counts < np.minimum(other_world, _reporting(other))
    return set(mine.numbers[np.where(world == other_world, ~alike, partial)].tolist())


def common(ours: StepTable, theirs: StepTable) -> tuple[StepTable, StepTable]:
    """The steps that both tables have, from each table."""
    return ours.only(np.isin(ours.numbers, theirs.numbers)), theirs.only(np.isin(theirs.numbers, ours.numbers))


def uneven(twin: StepTable) -> str | None:
    """A clause about a job whose ranks make different numbers of steps without a fault, as with DDP's Join. None for
    any other job. Such ranks have no common count of steps, so it is not known from which step a rank resumed."""
    made = dict(zip(*(found.tolist() for found in np.unique(twin.executions.rank, return_counts=True)), strict=True))
    if len(set(made.values())) < 2:
        return None
    counts = " and ".join(f"{count} (rank {rank})" for rank, count in list(made.items())[:2])
    return f"the ranks make different numbers of steps in the twin too, {counts}, so that steps have no common count"


def _reporting(history: History) -> int:
    """The number of ranks whose steps were seen: a log reports a single rank."""
    return len(history.executions.ranks)


def _worlds(history: History, steps: StepTable, most: int | None = None) -> Array:
    """For each step: the largest world size of the attempts that made it, but at most `most`."""
    sizes = np.zeros(len(steps.executions), np.int64)
    attempt = steps.executions.attempt
    for made in history.attempts:
        sizes[attempt == made.number] = made.world_size if most is None else min(made.world_size, most)
    return steps.most(sizes)


def differences(
    ours: Steps, theirs: Steps, allowed: float | Tolerances, other_world: float = OTHER_WORLD,
    factor: float = LEARNED_FACTOR,
) -> Iterator[Difference]:  # fmt: skip
    """Yields the differences in order of steps, only for steps that both runs have, and values that were seen in both.

    `allowed`: a relative tolerance, or tolerances by quantity. `other_world`: the least tolerance of the mean loss if
    the numbers of ranks differ. `factor`: the allowed number of spreads if the tolerance was learned."""
    limits = allowed if isinstance(allowed, Tolerances) else Tolerances.given(allowed)
    ours, theirs = StepTable.of(ours), StepTable.of(theirs)
    for step in _suspects(ours, theirs, limits, factor):
        mine, twins = ours[step], theirs[step]
        if mine.keys() == twins.keys():
            for rank in sorted(mine):
                yield from _of_rank(step, rank, mine[rank], twins[rank], limits, factor)
        else:
            yield from _of_mean(step, mine, twins, limits.loss, max(limits.loss.allowed(step, factor), other_world))


def _suspects(ours: StepTable, theirs: StepTable, limits: Tolerances, factor: float) -> list[int]:
    """The common steps in which some value may differ by more than is allowed."""
    both = Both.of(ours, theirs)
    far = both.beyond("losses", lambda step: limits.loss.allowed(step, factor), limits.loss.typical)
    far |= both.beyond("lr", lambda step: limits.rate.allowed(step, factor))
    return sorted({*both.ours.numbers[both.ours.any(far)].tolist(), *both.apart.tolist()})


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
    if absences(records_of(run)):  # steps without a replica are not compared, so another twin can't help
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
    mine, other = _losses(run), _losses(twin)
    if not mine or not other:
        return
    ours, theirs = sum(mine) / len(mine), sum(other) / len(other)
    if relative(ours, theirs, loss.typical) <= allowed:
        return
    # A job that accumulates gradients may divide each loss by the number of parts that a rank has.
    if relative(sum(mine) / len(run), sum(other) / len(twin), loss.typical) > allowed:
        yield Difference("loss", step, None, ours, theirs, relative(ours, theirs))


def _losses(by_rank: Mapping[int, Execution]) -> list[float]:
    """All losses of a step; empty if one of them was not seen."""
    losses = [loss for execution in by_rank.values() for loss in execution.losses]
    seen = [loss for loss in losses if loss is not None]
    return seen if len(seen) == len(losses) else []
