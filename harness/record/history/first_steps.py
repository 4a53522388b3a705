"""The witnesses of what a job does: the samples, losses and rates of its first steps, compared with those of earlier
attempts; and the facts from which a base is determined. step_evidence.py says what a witness and a base are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.record.history import step_evidence as names
from torchaos.harness.record.history.saves_and_loads import Load, Save
from torchaos.harness.record.history.snapshots import Snapshots
from torchaos.harness.record.history.step_evidence import Witness
from torchaos.harness.record.steps import Execution, Executions, StepTable
from torchaos.harness.record.steps.execution import sums_of, with_values

Array = npt.NDArray[Any]
Said = tuple[tuple[int, ...], str]  # bases that fit; the fact that this is based on
FEW = 8  # only the first steps after a resume; later steps may differ for other reasons
OTHER_RANKS = 0.2  # the trust in each group of ranks except the largest


@dataclass(frozen=True)
class Scene:
    """The facts about an attempt, or about a place in it, from which its base is determined. Local steps are counted
    from that place."""

    number: int  # of the attempt
    first: bool  # no attempt before it made a step or a save
    alone: bool  # there was no attempt before it
    own: Executions  # up to the next place at which the job may have gone back
    ranks: Collection[int]  # that make steps in the attempt
    loads: Sequence[Load]  # before its first step
    lines: Sequence[tuple[float, int]]  # (mono_s, step) of the job's log in this part
    saves: Sequence[Save]  # of earlier attempts, placed
    blind: bool  # the saves of some earlier attempt may not have been seen
    saves_seen: bool  # some save of the run was
    known: Sequence[Executions]  # placed: of the twin, of earlier attempts, and last, of this attempt
    log_offset: int | None  # by how much the log's count is usually ahead of ours; None: no log of an earlier attempt
    snapshots: Snapshots = field(default_factory=Snapshots)  # of earlier attempts
    peers: Sequence[Executions] = ()  # the final steps of other replicas, which have the same parameters after a step
    foreign: Collection[str] = ()  # files of another run, with which the first attempt began at the start
    after: int = 0  # the steps of the attempt before that place
    straight: int | None = None  # the global step at that place, if the count before it simply goes on
    trust: float = 1.0  # the trust that the attempt simply goes on there
    as_first: bool = False  # the first attempt simply went on after as many steps
    unseen: bool = False  # no state of the attempt was recorded, so a state may have been put back unseen
    # By rank: by how much the optimizer's own counter is ahead of the training, if it was new in this attempt.
    ahead: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def start(self) -> list[Execution]:
        """The first FEW steps of the attempt after `after`, of all ranks, with local steps that count from `after`.
        Their values show which state was restored."""
        first = self.own.at(self.own.local_step <= self.after + FEW)
        return [with_values(execution, {"local_step": execution.local_step - self.after}) for execution in first]

    @cached_property
    def of_same_ranks(self) -> list[Executions]:
        """The known steps of each attempt with the same ranks: other ranks divide the data in another way."""
        return self._of_same_ranks(self.known)

    @cached_property
    def of_others(self) -> list[Executions]:
        """Like `of_same_ranks`, without the steps of this attempt, which may have been a warm-up."""
        return self._of_same_ranks(self.known[:-1])

    def _of_same_ranks(self, known: Sequence[Executions]) -> list[Executions]:
        own = [steps.of_attempt(number) for steps in known for number in sorted(steps.attempts)]
        return [steps for steps in own if steps.ranks == self.ranks]


def grouped(name: str, by_rank: Mapping[int, Said], trust: float = 1.0) -> list[Witness]:
    """A witness for each group of ranks that agree, the largest group first. Smaller groups are trusted less: the step
    of all ranks must not become unknown because a few ranks have another state."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(by_rank):
        groups[by_rank[rank][0]].append(rank)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    return [
        Witness(name, fits, by_rank[ranks[0]][1], tuple(ranks), trust * (OTHER_RANKS if place else 1.0))
        for place, (fits, ranks) in enumerate(ordered)
    ]


Equal = Callable[[Execution, Execution], bool]
_FIRST_ONLY = 0.5  # the trust in losses if only the first agrees
_NEAR = 1e-4  # relative; losses that are farther apart differ by more than rounding
WARM = 60  # the first steps of an attempt, which may only warm it up
_MOST_STARTS = 256  # the fewest steps that begin like an attempt


def align(own: Mapping[int, Hashable], reference: Mapping[int, Collection[Hashable]]) -> tuple[int, ...]:
    """Finds each base b >= 0 that fits: the value of each of the first FEW steps n was also seen in global step b + n.
    A base at which a later step differs, perhaps by rounding, fits too, if before that step at least as many steps
    agree as for the others.

    `own`: the value of each step of the attempt. `reference`: the values that were seen in each global step; missing
    steps are skipped, except the first."""
    first, *later = sorted(own)[:FEW] or [0]
    starts = sorted(step - first for step, seen in reference.items() if own.get(first) in seen)
    agree = {
        base: [own[n] in reference[base + n] for n in later if base + n in reference] for base in starts if base >= 0
    }
    most = max((len(of) for of in agree.values() if all(of)), default=None)
    return tuple(base for base, of in agree.items() if most is not None and (all(of) or of.index(False) >= most))


def parts_of(own: Executions, known: Sequence[Executions]) -> set[int]:
    """The local steps, among the first WARM steps of an attempt, after which its samples or its schedule jump to those
    of other known steps; the steps before the jump may only have been a warm-up. `own`: all steps of the attempt; those
    of the rank that made the most steps are used."""
    found = set[int]()
    if not len(own):
        return found
    ranks, counts = np.unique(own.rank, return_counts=True)
    busiest = ranks[counts.argmax()]
    start = own.at((own.rank == busiest) & (own.local_step <= WARM))
    losses = dict(zip(start.local_step.tolist(), map(str, _first_loss(start).tolist()), strict=True))
    of_attempts = [part.of_attempt(number) for part in known for number in part.attempts]
    for column in ("samples_sum", "sched_step"):
        mine = sorted(_values(start, column, "local_step"))
        theirs: dict[int, set[Hashable]] = defaultdict(set)
        where: dict[Hashable, set[int]] = defaultdict(set)
        for part in of_attempts:
            # Another number of ranks divides the data in another way.
            if column == "sched_step" or part.ranks == own.ranks:
                for step, value in _values(part.at(part.rank == busiest), column, "global_step"):
                    theirs[step].add(value)
                    where[value].add(step)
        bases, before = set[int](), set[tuple[Hashable, str | None]]()
        for step, value in mine:
            left = {base for base in bases if value in theirs.get(base + step, (value,))}
            new = left or {there - step for there in where[value]}
            again = value, losses.get(step)
            if (bases and not left) or again in before or (new and not bases and max(new) < 0):
                found.add(step - 1)
                before.clear()
            before.add(again)
            bases = new
        if column == "sched_step":
            found |= {step - 1 for (_step, earlier), (step, value) in pairwise(mine) if value < earlier}
    return found


def _values(steps: Executions, column: str, number: str) -> Iterable[tuple[int, Any]]:
    """(number of the step, its value in the column), for the steps whose value is known."""
    values = steps.column(column)
    seen = steps.samples_known if column == "samples_sum" else ~np.isnan(values)
    return zip(steps.column(number)[seen].tolist(), values[seen].tolist(), strict=True)


def of_peers(scene: Scene) -> list[Witness]:
    """Finds the steps of a replica by its parameters: another replica had the same parameters after a step whose number
    is known. So steps get numbers even if the replica copied its state from a peer and has no step counter."""
    by_rank = dict[int, Said]()
    own: dict[int, dict[int, str]] = defaultdict(dict)
    for execution in scene.start:
        if execution.parameters is not None:
            own[execution.rank][execution.local_step] = execution.parameters
    for rank, seen in own.items():
        reference: dict[int, set[str]] = defaultdict(set)
        for execution in (each for peer in scene.peers for each in peer.at(peer.rank == rank).with_state):
            if execution.global_step is not None and execution.parameters is not None:
                reference[execution.global_step].add(execution.parameters)
        if fits := align(seen, reference):
            step = min(seen)
            rests_on = f"another replica had the parameters after its step {step} after step {fits[0] + step}"
            by_rank[rank] = fits, rests_on
    return grouped(names.STATE, by_rank)


def of_content(scene: Scene) -> list[Witness]:
    """The witnesses of the rates, the samples and the losses."""
    samples = _of_samples(scene)
    # Without recorded states a warm-up may not be seen; then the rates of other ranks show no start.
    rates = _of_column(
        names.RATES, scene, lambda execution: execution.lr or None, _first_rate, of_any_ranks=not scene.unseen
    )
    return [*rates, *samples, *_of_losses(scene, samples)]


def _of_samples(scene: Scene) -> list[Witness]:
    """The witness of the samples. They are aligned rank by rank or, if the earlier ranks no longer exist, by the
    samples of all ranks of a step together."""
    if found := _of_column(names.SAMPLES, scene, _samples, lambda steps: steps.column("samples_sum")):
        return found
    own = {step - scene.after: total for step, total in _totals(scene.own, "local_step", FEW).items()}
    if not own:
        return []
    reference: dict[int, set[int]] = defaultdict(set)
    for part in scene.known:
        for number in part.attempts:
            for step, total in _totals(part.of_attempt(number), "global_step").items():
                reference[step].add(total)
    if fits := align(own, reference):
        return [Witness(names.SAMPLES, fits, "taken over all ranks of a step")]
    other = _unlike(scene, _straight(scene), scene.start[:1], lambda ours, theirs: _samples(ours) == _samples(theirs))
    return [Witness(names.SAMPLES, (), "they are not those of that step", against=other)] if other else []


def _totals(steps: Executions, column: str, first: int | None = None) -> dict[int, int]:
    """The sum of the samples of all ranks, by the number of the step in `column`. `first`: only that many numbers.
    Steps with samples that were not seen are left out."""
    table = StepTable(steps.last_of(column, "rank"), column)
    table = table.only(~table.any(~table.executions.samples_known))
    totals = table.sums(table.executions.column("samples_sum"))
    return dict(zip(table.numbers[:first].tolist(), totals[:first].tolist(), strict=True))


def _straight(scene: Scene) -> set[int]:
    """The step from which the job goes on if it restored nothing: the step before or, for a new attempt, 0. Empty for
    the first attempt, or if a counter can show this."""
    if scene.straight is not None:
        return {scene.straight}
    return set() if scene.first or any(execution.opt_step is not None for execution in scene.start) else {0}


def _samples(execution: Execution) -> Hashable:
    """The number and the sum of the samples. Both are also known of steps whose single samples were not kept."""
    return sums_of(execution)[:2] if execution.samples_seen or execution.sums is not None else None


def _of_column(
    name: str, scene: Scene, read: Callable[[Execution], Hashable], key_of: Callable[[Executions], Array],
    only_first: bool = False, of_any_ranks: bool = False,
) -> list[Witness]:  # fmt: skip
    """The witness of the contents of steps, such as losses, aligned rank by rank. `key_of`: a number for each step;
    only steps with equal numbers can be equal. `only_first`: only the first step of each rank is compared.
    `of_any_ranks`: also compares with attempts of other ranks, because the contents do not depend on how ranks divide
    the data."""
    own: dict[int, dict[int, Hashable]] = defaultdict(dict)
    for execution in scene.start:
        if (key := read(execution)) is not None and not (only_first and own[execution.rank]):
            own[execution.rank][execution.local_step] = key
    if not own:
        return []
    firsts = {min(seen) for seen in own.values()}
    begun = scene.own.at(np.isin(scene.own.local_step - scene.after, list(firsts)))
    keys = np.unique(key_of(begun))
    starts = {int(step) for part in scene.known for step in np.unique(part.at(np.isin(key_of(part), keys)).global_step)}
    if len(starts) > _MOST_STARTS:
        return []  # a constant shows nothing
    near, compared = _around(starts, firsts), scene.known if of_any_ranks else scene.of_same_ranks
    reference: dict[int, dict[int, list[Hashable]]] = {rank: defaultdict(list) for rank in own}
    for execution in _where(compared, near):
        if execution.rank in own and execution.global_step is not None and (key := read(execution)) is not None:
            reference[execution.rank][execution.global_step].append(key)
    by_rank: dict[int, Said] = {}
    for rank, seen in own.items():
        if fits := align(seen, reference[rank]):
            by_rank[rank] = fits, f"those of its step {min(seen)} are those of step {fits[0] + min(seen)}"
    found = grouped(name, by_rank, _FIRST_ONLY if only_first else 1.0)
    made = {rank: {int(step) for part in compared for step in part.global_step[part.rank == rank]} for rank in own}
    return [
        replace(witness, beyond=max(made[witness.ranks[0]])) if len(witness.fits) > 1 else witness
        for witness in found
        # A value that fits every step of a rank, such as a constant, shows nothing.
        if not any(1 < len(made[rank]) <= len(witness.fits) for rank in witness.ranks)
    ]


def _of_losses(scene: Scene, samples: Sequence[Witness]) -> list[Witness]:
    """The witness of the losses. If they are not those of known steps, only the first loss is compared.

    If the first loss is known, later losses may differ by rounding, because some state was lost, or because some state
    was put in unseen; in the last case, the witness names the steps that do not fit. If the first loss is not known
    either, the steps with the same samples and other losses do not fit."""

    def read(execution: Execution) -> Hashable:
        return execution.losses if execution.loss_seen else None

    if found := _of_column(names.LOSSES, scene, read, _first_loss):
        return found
    if found := _of_column(names.LOSSES, scene, read, _first_loss, only_first=True, of_any_ranks=True):
        parted = _unlike(scene, _fits(found), scene.start)
        against = Witness(names.PARTED, (), "the first loss is equal, and later ones are not", against=parted)
        if scene.unseen and scene.straight is None:  # the loss of the first state may be that of a warm-up
            found = [witness for witness in found if 0 not in witness.fits]
        return [against] if parted else found
    own = {execution.rank: execution for execution in reversed(scene.start) if execution.loss_seen}
    unlike = _unlike(scene, _fits(samples) | _straight(scene), own.values())
    return [Witness(names.UNLIKE, (), "the same samples gave other losses", against=unlike)] if unlike else []


def _fits(witnesses: Iterable[Witness]) -> set[int]:
    return {step for witness in witnesses for step in witness.fits}


def _unlike(
    scene: Scene, bases: Collection[int], own: Collection[Execution], equal: Equal | None = None
) -> tuple[int, ...]:  # fmt: skip
    """The bases that do not fit: with such a base, a step of `own` would have the number of a known step, and differ
    from it (by `equal`, or in its losses)."""
    equal = equal or (lambda ours, theirs: _are_near(ours.losses, theirs.losses))
    due = {base + execution.local_step for base in bases for execution in own}
    if not due or len(due) > _MOST_STARTS:
        return ()
    known: dict[tuple[int | None, int], list[Execution]] = defaultdict(list)
    for execution in _where(scene.of_others, due):
        known[execution.global_step, execution.rank].append(execution)
    return tuple(
        base for base in sorted(bases)
        if any(
            (theirs := known.get((base + mine.local_step, mine.rank))) and not any(equal(mine, each) for each in theirs)
            for mine in own
        )
    )  # fmt: skip


def _where(known: Iterable[Executions], steps: Collection[int]) -> Iterator[Execution]:
    """The known executions of these global steps."""
    for part in known:
        yield from part.at(np.isin(part.global_step, list(steps)))


def _are_near(ours: Sequence[float | None], theirs: Sequence[float | None]) -> bool:
    """Whether the losses differ at most by rounding. A loss that was not seen counts as equal."""
    pairs = zip(ours, theirs, strict=False)
    return all(a is None or b is None or math.isclose(a, b, rel_tol=_NEAR) for a, b in pairs)


def _first_loss(steps: Executions) -> Array:
    return _first_of(steps.column("losses"))


def _first_rate(steps: Executions) -> Array:
    return _first_of(steps.column("lr"))


def _first_of(values: Array) -> Array:
    return values[:, 0] if values.shape[1] else np.full(len(values), np.nan)


def _around(steps: Iterable[int], firsts: Iterable[int]) -> list[int]:
    """The first steps of an attempt as global steps, if one of `firsts` (local steps) is one of `steps`."""
    return [step - first + local for step in set(steps) for first in firsts for local in range(1, FEW + 1)]
