"""Finds the steps in which two runs of a job differ in losses and learning rates, rank by rank, and decides whether
twins that were made earlier still belong to the job.

If a job saves in the middle of an accumulation, with its gradients, an attempt may execute only the rest of a step. The
losses and samples of such a step are the last part of the twin's step, and the following steps are equal to the twin's:
so the gradients of the first part came from the checkpoint. Such a step is compared as a whole.

Changed input files are found before a run (running/twin_key.py). Any other change shows only in the records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.analysis.checkpointing.checkpoint_contents import checkpoints_of
from torchaos.harness.analysis.checkpointing.checkpoint_diff import clashes
from torchaos.harness.analysis.checkpointing.resumed_from import resumed_in_words
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.ending import final_step
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.replica_verdict import absences
from torchaos.harness.analysis.tolerance import LEARNED_FACTOR, RATE, Steps, Tolerance, Tolerances, relative
from torchaos.harness.record.history import Execution, History, StepTable
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import Both
from torchaos.harness.record.steps.columns import is_none, lengths
from torchaos.harness.record.steps.executions import UNPLACED


def with_first_parts(history: History, twin: History) -> History:
    """The history. Each step that did only the rest of a step gets the losses and samples of the twin's whole step."""
    theirs = twin.by_step()
    whole = dict(_completed(history, theirs))
    return replace(history, executions=history.executions.replaced(whole)) if whole else history


def _completed(history: History, theirs: Steps) -> Iterator[tuple[int, Execution]]:
    """Yields the rows of such steps in the history's executions, each with the completed step."""
    every = history.executions
    step_of, attempt_of, segment_of = every.global_step, every.attempt, every.column("segment")
    later = np.flatnonzero((attempt_of > 0) & (step_of != UNPLACED))
    most = int(segment_of[later].max(initial=0)) + 1
    part_of = attempt_of[later].astype(np.int64) * most + segment_of[later]
    for part in np.unique(part_of).tolist():
        places = later[part_of == part]
        first = int(step_of[places].min())
        some = every[int(places[step_of[places] == first][0])]
        if (other := theirs.get(first, {}).get(some.rank)) is None or not _is_rest(some, other):
            continue
        near = places[step_of[places] <= first + 1].tolist()
        steps: dict[int, dict[int, Execution]] = defaultdict(dict)
        place_of: dict[tuple[int, int], int] = {}
        for place in near:
            execution = every[place]
            steps[execution.global_step or 0][execution.rank] = execution
            place_of[execution.global_step or 0, execution.rank] = place
        own, twins = steps[first], theirs.get(first, {})
        if own.keys() != twins.keys() or not all(_is_rest(own[rank], twins[rank]) for rank in own):
            continue
        if _led_to_the_same(own, twins, steps.get(first + 1, {}), theirs.get(first + 1, {})):
            for rank, execution in own.items():
                other = twins[rank]
                # Whether its samples are the end of the twin's samples can't be seen from a sum.
                blind = execution.sums is not None or other.sums is not None
                samples, indices = ((), ()) if blind else (other.samples, other.indices)
                yield (
                    place_of[first, rank],
                    replace(execution, losses=other.losses, samples=samples, indices=indices, sums=None),
                )


def _is_rest(own: Execution, twin: Execution) -> bool:
    """Whether everything that the rank did in the step is the end of the twin's step, but not the whole step."""
    if not 0 < len(own.losses) < len(twin.losses):
        return False
    blind = own.sums is not None or twin.sums is not None
    return all(
        (blind and mine is not own.losses) or mine == others[len(others) - len(mine) :]
        for mine, others in ((own.losses, twin.losses), (own.samples, twin.samples), (own.indices, twin.indices))
    )


def _led_to_the_same(
    own: Mapping[int, Execution], twins: Mapping[int, Execution],
    next_own: Mapping[int, Execution], next_twins: Mapping[int, Execution],
) -> bool:  # fmt: skip
    """Whether the step had the same result as the twin's. Compares the parameters after the step if both were seen,
    otherwise the losses of the next step."""
    pairs = [(own[rank].parameters, twins[rank].parameters) for rank in own]
    if None not in [parameters for pair in pairs for parameters in pair]:
        return all(mine == other for mine, other in pairs)
    losses = [
        (next_own[rank].losses, next_twins[rank].losses) for rank in own if rank in next_own and rank in next_twins
    ]
    return len(losses) == len(own) and all(mine and mine == other for mine, other in losses)


_ROUNDING = RATE.floor
_FEW = 4  # the fewest steps in which a shift of the schedule is searched


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
        twin = theirs[first.step].get(first.rank)
        at_once = own[0] == first.step and twin and of.sched_step is not None and of.sched_step == twin.sched_step
        return said("rates apart" if at_once else "rates other", resumed=resumed)
    if window[0] + shift == min(twins):
        return said("rates anew", step=min(twins), resumed=resumed)
    steps = "one step" if abs(shift) == 1 else f"{abs(shift)} steps"
    if shift > 0:
        return said("rates later" if of.sched_step is None else "rates ahead", steps=steps, resumed=resumed)
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


Array = npt.NDArray[Any]

ENOUGH = 3  # the number of twins from which noise is learned
OTHER_WORLD = 0.01  # relative: the least tolerance for means over another number of ranks, which sum in another order


@dataclass(frozen=True)
class Difference:
    what: str  # "loss", "learning rate" or "number of losses"; "parameters": then the values are the gradient's norms
    step: int  # global
    rank: int | None  # None: the mean over the ranks
    ours: float | None
    theirs: float | None
    relative: float
    backward: str = ""  # which backward of the step has this loss, if there are several
    before_samples: bool = False  # its own samples are the twin's, and later ones of the step are not


def history_of(run: Record, twins: Sequence[Record]) -> History:
    """The history of the run, completed from the first twin where the run itself does not show enough: if no witness of
    the run gives global numbers to the steps of an attempt, or if an attempt did only the rest of a step."""
    if not twins:
        return run.history
    history, twin = run.history, twins[0].history
    return with_first_parts(run.history_with(twin) if history.unplaced else history, twin)


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
    """The steps that both runs made, but one rank of one of them did not report: an error had switched off its agent,
    or it died of the fault at the very end of the step. Means and sums leave these steps out."""
    mine, twins = common(ours, theirs)
    alike = np.isin(mine.numbers, Both.of(mine, twins).ours.numbers)
    world, other_world = _worlds(history, mine), _worlds(other, twins)
    partial = mine.counts < np.minimum(world, _reporting(history))
    partial |= twins.counts < np.minimum(other_world, _reporting(other))
    return set(mine.numbers[np.where(world == other_world, ~alike, partial)].tolist())


def common(ours: StepTable, theirs: StepTable) -> tuple[StepTable, StepTable]:
    """Both tables, with only the steps that both have."""
    return ours.only(np.isin(ours.numbers, theirs.numbers)), theirs.only(np.isin(theirs.numbers, ours.numbers))


def without_losses(*tables: StepTable) -> set[int]:
    """The ranks that have no loss in any step of these runs, as in a pipeline all stages before the last."""
    ranks, seen = set[int](), set[int]()
    for table in tables:
        losses = table.executions.column("losses")
        ranks |= table.executions.ranks
        seen |= table.executions.at(lengths(losses) > is_none(losses).sum(1)).ranks
    return ranks - seen


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
    the numbers of ranks differ, unless the scenario gives one. `factor`: the allowed number of spreads if the tolerance
    was learned."""
    limits = allowed if isinstance(allowed, Tolerances) else Tolerances.given(allowed)
    least = 0.0 if limits is allowed and limits.loss.basis == "given" else other_world
    ours, theirs = StepTable.of(ours), StepTable.of(theirs)
    apart = Both.of(ours, theirs).apart
    silent, twins_silent = without_losses(ours.at(apart)), without_losses(theirs.at(apart))
    for step in _suspects(ours, theirs, limits, factor):
        mine, twins = ours[step], theirs[step]
        if mine.keys() == twins.keys():
            for rank in sorted(mine):
                yield from _of_rank(step, rank, mine[rank], twins[rank], limits, factor)
        else:
            mine, twins = _without(mine, silent), _without(twins, twins_silent)
            yield from _of_mean(step, mine, twins, limits.loss, max(limits.loss.allowed(step, factor), least))


def _suspects(ours: StepTable, theirs: StepTable, limits: Tolerances, factor: float) -> list[int]:
    """The common steps in which some value may differ by more than is allowed."""
    both = Both.of(ours, theirs)
    far = both.beyond("losses", lambda step: limits.loss.allowed(step, factor), limits.loss.typical)
    far |= both.beyond("lr", lambda step: limits.rate.allowed(step, factor))
    return sorted({*both.ours.numbers[both.ours.any(far)].tolist(), *both.apart.tolist()})


def agree(run: Record, twins: Sequence[Record]) -> bool:
    """Whether losses, learning rates and checkpoints of the run are bitwise equal to those of the first twin. Values
    that were not seen in both are not compared."""
    return not what_differs(run, twins)


def what_differs(run: Record, twins: Sequence[Record]) -> str:
    """The first difference from the first twin, in words, if the run is not bitwise equal to it: the first step with
    another loss or learning rate, or else an entry of a checkpoint. Empty if they agree."""
    twin = twins[0]
    theirs = twin.history.by_step()
    ours = until(history_of(run, twins).by_step(), final_step(twin))
    if first := next(differences(ours, until(theirs, final_step(twin)), 0.0), None):
        return f"the {first.what} of step {first.step}"
    found = clashes(checkpoints_of(run) or [], checkpoints_of(twin) or [])
    if not found:
        return ""
    first_ = found[0]
    return f"{first_.name} in {first_.path}" if first_.name != first_.path else first_.path


def wants_more(run: Record, twins: Sequence[Record]) -> bool:
    """Whether another twin would help to judge: the run differs from its only twin, or there are fewer than ENOUGH
    twins and they differ among themselves."""
    if absences(run.of_replicas):  # steps without a replica are not compared, so another twin can't help
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
    for number, (mine, other) in enumerate(zip(run.losses, twin.losses, strict=True), 1):
        mine, other = mine or 0.0, other or 0.0
        if relative(mine, other, limits.loss.typical) > limits.loss.allowed(step, factor):
            backward = f"backward {number} of {len(run.losses)}" if len(run.losses) > 1 else ""
            early = _is_before_samples(run, twin, number)
            yield Difference("loss", step, rank, mine, other, relative(mine, other), backward, early)
            return


def _is_before_samples(run: Execution, twin: Execution, number: int) -> bool:
    """Whether the first difference in the samples of the step comes after backward `number` (from 1). Then the loss of
    this backward can't follow from the samples. Each backward is taken to have as many samples as the others."""
    mine, twins, each = run.samples, twin.samples, divmod(len(twin.samples), len(twin.losses))
    until = number * each[0]
    return bool(until) and not each[1] and len(mine) == len(twins) and mine != twins and mine[:until] == twins[:until]


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


def _without(by_rank: Mapping[int, Execution], silent: Set[int]) -> dict[int, Execution]:
    return {rank: execution for rank, execution in by_rank.items() if rank not in silent}


def _losses(by_rank: Mapping[int, Execution]) -> list[float]:
    """All losses of a step; empty if one of them was not seen."""
    losses = [loss for execution in by_rank.values() for loss in execution.losses]
    seen = [loss for loss in losses if loss is not None]
    return seen if len(seen) == len(losses) else []


def are_of_another_job(run: Record, old: Sequence[Record]) -> bool:
    """Whether the run differs from each of these twins before its first fault, by more than the twins differ from each
    other. `old`: twins that were made at the same time."""
    history = history_of(run, old)
    landed = landings(run)
    early = before(history, landed[0].at_s if landed else math.inf)
    theirs = [until(twin.history.by_step(), final_step(twin)) for twin in old]
    known = [{step: ranks for step, ranks in steps.items() if step in early} for steps in theirs]
    limits = Tolerances.learned(known)
    return all(any(differences(early, steps, limits)) for steps in known)


def differ_by_age(old: Sequence[Record], new: Sequence[Record]) -> bool:
    """Whether a new twin differs from an earlier twin. Then the two together can't show the noise of the job."""
    return any(not agree(recent, [earlier]) for recent in new for earlier in old)
