"""Whether a job goes on as its twins do, by step and rank: its losses and learning rates, and its parameters.
Parameters are also compared between the ranks that hold replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.analysis.checkpointing.carried_state import carried_into
from torchaos.harness.analysis.checkpointing.resumed_from import resumed_in_words
from torchaos.harness.analysis.checkpointing.state_differences import in_words as in_words_of_parameters
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.agreement import (
    Differing,
    before,
    differences,
    history_of,
    story,
    uneven,
    unreported,
    until,
)
from torchaos.harness.analysis.comparison.causes import likeliest_cause
from torchaos.harness.analysis.comparison.losses import Comparison, first_of, in_words, measured_of
from torchaos.harness.analysis.comparison.parameters import AgainstTwins
from torchaos.harness.analysis.comparison.sample_counts import other_iterations
from torchaos.harness.analysis.comparison.step_facts import skipped_update
from torchaos.harness.analysis.ending import final_step, teardown_aborts
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.missing_data import why_unplaced, why_unseen
from torchaos.harness.analysis.tolerance import (
    CERTAIN,
    LEARNED_FACTOR,
    RATE,
    ROUNDING,
    Steps,
    Tolerance,
    learned,
    relative,
)
from torchaos.harness.interfaces import Finding, First, What, failed, inconclusive, passed
from torchaos.harness.protocol.check_sums import is_whole
from torchaos.harness.record.history import Execution, Executions, History, StepTable
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import Both
from torchaos.harness.record.steps.columns import lengths
from torchaos.harness.record.steps.executions import equal

_BLIND = "without a twin, steps that were done only once were compared with nothing"


def losses(run: Record, twins: Sequence[Record], tolerance: float | None = None) -> Finding:
    """Compares losses and learning rates with those of the twins, by step and rank. Without a twin, compares steps that
    were done again with their first execution. `tolerance`: the largest relative difference that passes; None: equal
    bits, except for rounding, or a tolerance learned from twins that differ."""
    history = history_of(run, twins)
    if history.unplaced:
        return inconclusive(why_unplaced(run, history.unplaced))
    if not twins:
        return replace(_redone(run, history, tolerance or 0.0), bound={"tolerance": tolerance or 0.0})
    blind = next((twin for twin in twins if not twin.history.executions.loss_seen.any()), None)
    if blind:
        return inconclusive(f"the twin's losses were not seen: {why_unseen(blind, 'loss')}")
    comparison = Comparison(run, history, twins, tolerance)
    return replace(comparison.finding(), bound=comparison.bound)


def _redone(run: Record, history: History, tolerance: float) -> Finding:
    """Compares each step that was done again with its first execution."""
    olds, news = history.repeated()
    seen = olds.loss_seen & news.loss_seen
    if not seen.any():
        return inconclusive("there is no twin, and no step was done twice: nothing to compare the losses with")
    near = ~(equal(olds, news, "losses") & equal(olds, news, "lr")) & seen
    for old, new in zip(olds.at(near), news.at(near), strict=True):
        ours, theirs = {new.global_step or 0: {new.rank: new}}, {old.global_step or 0: {old.rank: old}}
        first = next(differences(ours, theirs, tolerance), None)
        if first:
            of_rank = news.rank == new.rank
            every = {one.global_step or 0: {one.rank: one} for one in olds.at(of_rank)}
            again = {one.global_step or 0: {one.rank: one} for one in news.at(of_rank)}
            cause = likeliest_cause(run, history, {**again, **ours}, {**every, **theirs}, first)
            words = f"{in_words(first, 'the first time')} {cause.words}"
            finding = failed(words, first_of(first, cause), **measured_of(first))
            return replace(finding, cause=cause.short, at_s=new.mono_s)
    steps = np.unique(news.global_step[seen]).tolist()
    return passed(
        f"{'all ' if len(steps) > 1 else ''}{counted(len(steps), 'step', 'that was/that were')} done again "
        f"({steps[0]} to {steps[-1]}) gave the same losses as the first time; {_BLIND}",
        steps=len(steps),
    )


Array = npt.NDArray[Any]

_ROUNDING = RATE.floor


def rates(run: Record, twins: Sequence[Record], tolerance: float | None = None) -> Finding:
    """Compares the learning rates with those of the twins, by step and rank. Without a twin, compares steps that were
    done again with their earlier execution. `tolerance`: the largest relative difference that passes; None: 1e-9, or a
    tolerance learned from the twins if these differ from each other. Inconclusive if no learning rate was seen, if the
    global steps are not known, or if the run differs from the twin before any fault."""
    history = history_of(run, twins)
    if not _has_rates(history.executions).any():
        return inconclusive("no learning rate was seen: no optimizer of torch made a step, and the log shows none")
    if history.unplaced:
        return inconclusive(why_unplaced(run, history.unplaced))
    given = Tolerance("given", _ROUNDING if tolerance is None else tolerance)
    if not twins:
        return replace(_redone_rates(history, given), bound={"tolerance": given.given})
    steps = [until(twin.history.by_step(), final_step(twin)) for twin in twins]
    landed = landings(run)
    early = before(history, landed[0].at_s if landed else float("inf"))
    allowed = early_allowed = given
    if tolerance is None and learned(steps, RATE).basis == "learned":
        allowed, early_allowed = learned(steps, RATE), learned(steps, RATE, max(early, default=0))
    invalid = next(_beyond(early, steps, early_allowed, CERTAIN), None)
    if invalid:
        words = _words(invalid, "in the twin")
        return inconclusive(f"the twin can't be compared with this run: before any fault, {words}")
    found = _compared(history, twins[0].history, steps, allowed)
    return replace(found, bound={"tolerance": allowed.largest})


def _compared(history: History, twin: History, twins: Sequence[StepTable], allowed: Tolerance) -> Finding:
    ours, theirs = history.by_step(), twins[0]
    first = next(_beyond(ours, twins, allowed, CERTAIN), None)
    if first and (first.ours is None or first.theirs is None):
        return inconclusive(
            f"{_words(first, 'in the twin')} Which parameter groups take part in a step is not the same, so their "
            "learning rates can't be compared.",
            First(What.RATE, first.step),
        )
    if first and (odd := uneven(theirs)):
        words = f"{_words(first, 'in the twin')} But {odd}: it is not known whether that is a defect."
        return inconclusive(words, First(What.RATE, first.step))
    if first:
        before = [step for step in sorted(ours.keys() & theirs.keys()) if step <= first.step]
        skip = skipped_update(before, ours, theirs)
        clause = skip.clause if skip else other_iterations(ours, theirs, first.step)
        why = f"{clause[0].upper()}{clause[1:]}." if clause else story(history, ours, theirs, first)
        return failed(
            f"{_words(first, 'in the twin')} {why}", First(What.RATE, first.step),
            step=first.step, rank=first.rank, group=first.group, relative_difference=first.relative,
        )  # fmt: skip
    common, last, twins_last = ours.keys() & theirs.keys(), max(ours, default=0), max(theirs, default=0)
    dark = unreported(history, ours, twin, theirs)
    for steps in (ours, theirs):
        dark |= common & set(steps.numbers[steps.any(~_has_rates(steps.executions))].tolist())
    blind = min(dark, default=None)
    if blind is not None or not common:
        where = "in no step" if blind is None else f"in step {blind}"
        return inconclusive(f"the learning rate was not seen {where} on all ranks, in the run or in the twin")
    if last < twins_last:
        return inconclusive(
            f"the final history ends with step {last}, and the twin's with step {twins_last}: there are no learning "
            "rates of the steps between"
        )
    noisy = next((step for step in sorted(common) if not allowed.judges(step)), None)
    if noisy is not None:
        return inconclusive(
            f"too noisy to judge: in step {noisy} the learning rates of the twins differ from each other by "
            f"{allowed.spreads.get(noisy, math.inf):.2g}, for example because a schedule follows the loss"
        )
    near = next(_beyond(ours, twins, allowed), None)
    if near:
        return inconclusive(
            f"{_words(near, 'in the twin')} The twins differ from each other by {allowed.spreads[near.step]:.2g} "
            "there: a defect, or chance. More twins or a tolerance would decide."
        )
    equal = "the twin's" if allowed.basis == "given" else "as near to the twins' as the twins' are to each other"
    which = counted(len(common), "step")
    which = which if last == twins_last else f"the {which} that both made"
    return passed(f"the learning rates of {which} are {equal}", steps=len(common))


def _redone_rates(history: History, allowed: Tolerance) -> Finding:
    """Compares each step that was done again with its first execution. For a run without a twin."""
    olds, news = history.repeated()
    seen = _has_rates(olds) & _has_rates(news)
    if not seen.any():
        return inconclusive("there is no twin, and no step was done twice: nothing to compare the learning rates with")
    near = seen & ~equal(olds, news, "lr")
    for old, new in zip(olds.at(near), news.at(near), strict=True):
        step = new.global_step or 0
        first = next(_differences({step: {new.rank: new}}, {step: {old.rank: old}}, allowed, 1.0), None)
        if first:
            words = _words(first, "the first time")
            return replace(failed(words, First(What.RATE, step), step=step, rank=new.rank), at_s=new.mono_s)
    return passed(
        f"{counted(int(seen.sum()), 'step', 'that was/that were')} done again had the same learning rates as "
        "the first time; without a twin, steps "
        "that were done only once were compared with nothing"
    )


def _beyond(
    ours: Steps, twins: Sequence[Steps], allowed: Tolerance, factor: float = LEARNED_FACTOR
) -> Iterator[Differing]:
    """The differences that the run has from every twin, with the values of the first twin."""
    others = [
        {
            (difference.step, difference.rank, difference.group)
            for difference in _differences(ours, twin, allowed, factor)
        }
        for twin in twins[1:]
    ]
    for difference in _differences(ours, twins[0], allowed, factor):
        if all((difference.step, difference.rank, difference.group) in other for other in others):
            yield difference


def _differences(ours: Steps, theirs: Steps, allowed: Tolerance, factor: float) -> Iterator[Differing]:
    """The differences by step, for ranks and values that both runs have. After a change of the number of ranks, any
    rank of the twin is used, because all ranks follow the same schedule."""
    for step in _suspects(StepTable.of(ours), StepTable.of(theirs), allowed, factor):
        for rank, one in sorted(ours[step].items()):
            other = theirs[step].get(rank) or next(iter(theirs[step].values()))
            for group, (mine, twins) in enumerate(zip_longest(one.lr, other.lr) if one.lr and other.lr else ()):
                found = Differing(step, rank, group, mine, twins)
                if found.relative > _allowed(allowed, step, factor) or None in (mine, twins):
                    yield found


def _allowed(tolerance: Tolerance, step: int, factor: float) -> float:
    return max(_ROUNDING, tolerance.allowed(step, factor))


def _suspects(ours: StepTable, theirs: StepTable, allowed: Tolerance, factor: float) -> list[int]:
    """The common steps that must be compared value by value, sorted: those with a rate that differs by more than is
    allowed, and those that the two runs made on different ranks. `factor`: how many spreads a learned tolerance
    allows."""
    both = Both.of(ours, theirs)
    far = both.beyond("lr", lambda step: _allowed(allowed, step, factor))
    return sorted({*both.ours.numbers[both.ours.any(far)].tolist(), *both.apart.tolist()})


def _has_rates(steps: Executions) -> Array:
    return lengths(steps.column("lr")) > 0


def _words(first: Differing, other: str) -> str:
    group = f" of parameter group {first.group}" if first.group else ""
    told = ["none" if rate is None else f"{rate:.6g}" for rate in (first.ours, first.theirs)]
    return (
        f"the learning rate{group} differs first in step {first.step} on rank {first.rank}: {told[0]} instead of "
        f"{told[1]} {other}."
    )


def across_replicas(run: Record) -> Finding:
    """Judges whether ranks of the same number have equal parameters in all replicas that made a step."""
    parts = run.of_replicas
    steps = [record.history.by_step() for record in parts]
    compared = 0
    for step in sorted(set().union(*steps)):
        of_rank: dict[int, dict[int, Execution]] = {}
        for number, by_step in enumerate(steps):
            for rank, one in by_step.get(step, {}).items():
                of_rank.setdefault(rank, {})[number] = one
        for rank, by_replica in of_rank.items():
            sums = {number: one.parameters for number, one in by_replica.items()}
            if None in sums.values():
                return inconclusive(f"the parameters after step {step} were not seen on rank {rank} of each replica")
            if len(set(sums.values())) > 1:
                base, odd = min(sums), next(number for number in sums if sums[number] != sums[min(sums)])
                resumed = resumed_in_words(parts[odd].history, by_replica[odd])
                return failed(
                    f"replicas are no longer equal: after step {step} the parameters of rank {rank} in replica {odd} "
                    f"are not those in replica {base}, {resumed}",
                    First(What.REPLICAS, step), step=step, replica=odd,
                )  # fmt: skip
            compared += len(sums) > 1
    if not compared:
        return inconclusive("no step was made by two replicas, so there is nothing to compare")
    return passed(f"the replicas are equal after each of {compared} steps that they made together", steps=compared)


class Parameters:
    """The parameters of a run after each step, compared between the ranks that hold replicas, and with the twins'."""

    def __init__(self, run: Record, twins: Sequence[Record]) -> None:
        history = history_of(run, twins)
        self._run, self._history, self._twins = run, history, twins
        self._theirs = [until(twin.history.by_step(), final_step(twin)) for twin in twins]
        last = max(self._theirs[0], default=0) if twins else None
        self._ours = until(history.by_step(), last if last and teardown_aborts(run, last) else None)
        landed = landings(run)
        self._early = before(history, landed[0].at_s if landed else float("inf"))

    def finding(self, replicas_only: bool = False) -> Finding:
        if self._history.unplaced:
            return inconclusive(why_unplaced(self._run, self._history.unplaced))
        apart = self._apart()
        if apart is not None:
            return apart
        replicas = self._replicas()
        if replicas_only or not self._twins:
            unseen = self._unseen() if self._are_replicas else None
            if unseen is not None:
                return inconclusive(f"{replicas}; {unseen}")
            why = "" if replicas_only else "; without a twin, a defect that all replicas share can't be found"
            return passed(f"{replicas}{why}") if self._are_replicas else inconclusive(f"{replicas}{why}")
        return AgainstTwins(self._run, self._history, self._twins, self._ours, self._early).finding(replicas)

    # -- between the ranks

    @property
    def _are_replicas(self) -> bool:
        """Whether the ranks are known to hold equal parameters when nothing goes wrong."""
        healthy = self._theirs[0] if self._twins else self._early
        seen = [_differ(by_rank) for by_rank in healthy.values()]
        return True not in seen and False in seen

    def _apart(self) -> Finding | None:
        if not self._are_replicas:
            return None
        first = next((step for step in sorted(self._ours) if _differ(self._ours[step])), None)
        if first is None:
            return None
        by_rank = self._ours[first]
        base = next(one.parameters for one in by_rank.values())
        odd = [rank for rank, one in by_rank.items() if one.parameters != base]
        until_ = [step for step in sorted(self._ours) if _differ(self._ours[step])]
        step = next(iter(by_rank.values()))
        resumed, why = resumed_in_words(self._history, step), self._why_apart(first, step)
        return failed(
            f"replicas are no longer equal: after step {first} the parameters of rank {_list(odd)} are not those of "
            f"rank {min(by_rank)}, {resumed}, and so in {counted(len(until_), 'step')} in all. {why}",
            First(What.REPLICAS, first), step=first, rank=odd[0], steps=len(until_),
        )  # fmt: skip

    def _why_apart(self, step: int, one: Execution) -> str:
        life = self._history.attempt(one.attempt)
        if life is None or life.base is None or (life.base == 0 and not life.number and not one.segment):
            return said("fault on a rank")
        carried = carried_into(self._run, one.attempt, one.segment)
        if carried and carried.others:
            return said("apart by state", found=in_words_of_parameters(carried.others, life.world_size))
        if carried and carried.parameters and carried.lost:
            return said("apart by state", found=f"the {' and the '.join(carried.lost)} are others")
        exact = carried and carried.parameters and carried.moments
        norms = [one.norm for one in self._ours[step].values() if one.norm is not None]
        if norms and max(relative(norms[0], norm) for norm in norms) > ROUNDING:
            return said("apart by gradients")
        if exact:
            return said("apart unseen")
        begun = {one.restored for one in self._ours.get(life.base + 1, {}).values()}
        if None not in begun and len(begun) > 1 and not one.segment:
            return said("apart by loads", step=life.base + 1)
        if len(norms) < 2:
            return said("apart unknown")
        return said("apart in the update")

    def _replicas(self) -> str:
        if not self._are_replicas:
            return f"{self._no_replicas()}, so there are no replicas to compare"
        steps = [step for step, by_rank in self._ours.items() if _differ(by_rank) is False]
        return f"the replicas are equal after each of {len(steps)} steps"

    def _no_replicas(self) -> str:
        healthy = self._theirs[0] if self._twins else self._early
        if all(len(by_rank) < 2 for by_rank in self._ours.values()):
            return "no step belongs to several ranks"
        if any(map(_differ, healthy.values())):
            return "the ranks hold different parameters without the fault too"
        return "the ranks hold parts of the model"

    def _unseen(self) -> str | None:
        """A clause about the parameters of replicas that were not seen. The last step of a superseded attempt may be
        missing: its rank may have died before it reported the step, and the later steps are compared."""
        last_of = {self._attempt(step): step for step in sorted(self._ours)}
        first_of = {self._attempt(step): step for step in sorted(self._ours, reverse=True)}
        last = max(last_of.values())
        for step, by_rank in sorted(self._ours.items()):
            attempt = self._attempt(step)
            cut = step == last_of[attempt] and step not in (last, first_of[attempt])
            world = life.world_size if (life := self._history.attempt(attempt)) else 0
            if world > 1 and not cut and (_differ(by_rank) is None or len(by_rank) < world):
                return f"the parameters after step {step} were not seen on all {world} ranks"
        theirs = max(self._theirs[0], default=0) if self._twins else 0
        if last < theirs:
            return f"the final history ends with step {last}, and the twin's with step {theirs}"
        return None

    def _attempt(self, step: int) -> int:
        return max(one.attempt for one in self._ours[step].values())


def _differ(by_rank: Mapping[int, Execution]) -> bool | None:
    """Whether the ranks hold different parameters; None if that is not known."""
    sums = [one.parameters for one in by_rank.values()]
    if len(sums) < 2 or not all(sum_ is not None and is_whole(sum_) for sum_ in sums):
        return None
    return len(set(sums)) > 1


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
