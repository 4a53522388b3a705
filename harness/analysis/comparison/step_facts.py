"""Finds the first differences between the steps of a run and those of its twin, as facts for a cause (causes.py)."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torchaos.harness.analysis.checkpointing.carried_state import changes_weights_between_steps
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.agreement import Difference
from torchaos.harness.analysis.comparison.sample_counts import (
    Samples,
    are_copied,
    digests_of,
    ends_of,
    renumbered,
    total_of,
    without_copies,
)
from torchaos.harness.analysis.comparison.sample_reasons import are_of_another_part, may_be_computed
from torchaos.harness.analysis.tolerance import Steps
from torchaos.harness.record.history import Execution, History, StepTable
from torchaos.harness.record.plan import counted, numbered
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import Both


class Fact(NamedTuple):
    """A quantity that differs from what it should be."""

    quantity: str  # empty: the clause itself proves the cause
    step: int  # global; the first step in which it differs
    clause: str
    made: bool = False  # samples that the job may compute: they follow from what else differed


def accumulation(base: int, ours: Steps, theirs: Steps, first: Difference) -> str | None:
    if first.what != "number of losses" or first.step != base + 1 or (first.ours or 0) >= (first.theirs or 0):
        return None
    mine, twins = ours[first.step], theirs[first.step]
    if not ends_of(mine, twins):
        return None
    return said("accumulation", ours=counted(int(first.ours or 0), "backward"), theirs=first.theirs)


def is_scaled(ours: Steps, theirs: Steps, first: Difference) -> bool:
    """Whether what differs first is not the loss, but the scale with which it is multiplied before the backward."""
    return loss_scale(ours, theirs, first) is not None


def loss_scale(ours: Steps, theirs: Steps, first: Difference) -> str | None:
    """A clause if all losses differ from the twin's by the same power of two: loss scaling changes only the exponent of
    a number."""
    mine, twins = ours[first.step], theirs[first.step]
    if first.what != "loss" or mine.keys() != twins.keys():
        return None
    pairs = [pair for rank in mine for pair in zip(mine[rank].losses, twins[rank].losses, strict=False)]
    factors = {mine / other if mine and other else 0.0 for mine, other in pairs}
    factor = next(iter(factors), 0.0)
    if len(factors) > 1 or not math.isfinite(factor) or factor <= 0 or math.frexp(factor)[0] != 0.5:
        return None
    return said("loss scale", step=first.step, factor=factor)


def weights_with(base: int, ours: Steps, theirs: Steps) -> dict[int, str] | None:
    """The ranks that began with other weights than the weights after step `base`, each with a phrase about its weights.
    None if that was not seen. The agent reads the weights in the first backward of a process, before any training."""
    begun, fresh = ours.get(base + 1, {}), theirs.get(min(theirs, default=0), {})
    before = ours if all(done.parameters for done in ours.get(base, {}).values()) and base in ours else theirs
    due = {rank: done.parameters for rank, done in before.get(base, {}).items()}
    if not base:
        due = {rank: done.restored for rank, done in fresh.items()}
    if not begun or begun.keys() != due.keys():
        return None
    if any(done.restored is None or due[rank] is None for rank, done in begun.items()):
        return None
    if changes_weights_between_steps(StepTable.of(theirs).executions):
        return None  # the sums after a step are not those with which the next step begins
    as_new = {rank for rank, done in begun.items() if rank in fresh and done.restored == fresh[rank].restored}
    return {
        rank: "were those of a fresh start" if rank in as_new else "were others"
        for rank, done in begun.items()
        if done.restored != due[rank]
    }


def weights_in_words(base: int, weights: Mapping[int, str]) -> str:
    kinds = [(words, [rank for rank in weights if weights[rank] == words]) for words in dict.fromkeys(weights.values())]
    clauses = " and ".join(f"those of rank {listed(ranks)} {words}" for words, ranks in kinds)
    return f"before step {base + 1} {clauses}"


def other_in(since: Sequence[int], ours: Steps, theirs: Steps, *columns: str) -> list[int]:
    """The steps of `since` in which one of these columns may differ on some rank."""
    both = Both.of(StepTable.of(ours).at(since), StepTable.of(theirs).at(since))
    other = np.any([~both.equal(column) for column in columns], axis=0)
    return sorted({*both.ours.numbers[both.ours.any(other)].tolist(), *both.apart.tolist()})


def with_samples_of_their_own(since: Sequence[int], twins: Sequence[Steps]) -> frozenset[int]:
    """The steps whose samples differ between the twins too, as with an augmentation that nothing seeds."""
    return frozenset(step for twin in twins[1:] for step in other_in(since, twins[0], twin, "samples", "in_samples"))


def samples_fact(since: Sequence[int], ours: Steps, theirs: Steps, noisy: Collection[int] = ()) -> Fact | None:
    """The first step that consumed other samples than in the twin. `noisy`: steps whose samples differ between the
    twins too; in these, only indices count."""
    wholes = [StepTable.of(ours), StepTable.of(theirs)]
    if are_copied(wholes[1]):
        wholes = [without_copies(whole) for whole in wholes]
    for step in other_in(since, ours, theirs, "samples", "in_samples"):
        if ours[step].keys() != theirs[step].keys():
            if step in noisy:
                continue
            mine, twins = (_all_samples(whole[step]) for whole in wholes)
            if mine is not None and twins is not None and mine != twins:
                return Fact("samples", step, said("data", who="all ranks together were", step=step))
            continue
        pairs = {rank: (one, theirs[step][rank]) for rank, one in sorted(ours[step].items())}
        odd = [
            rank for rank, (one, twin) in pairs.items()
            if one.samples_seen and twin.samples_seen
            and (bool(twin.indices) and one.indices != twin.indices if step in noisy else one.samples != twin.samples)
        ]  # fmt: skip
        if odd and are_of_another_part(ours[step], theirs[step]):
            return None
        if odd:
            who = f"{numbered('rank', odd)} {'was' if len(odd) == 1 else 'were'}"
            known = all(one.indices and one.indices == twin.indices for one, twin in map(pairs.__getitem__, odd))
            name = "contents" if known and not renumbered(ours, theirs) else "data"
            if name == "data" and _are_new([*map(pairs.__getitem__, odd)], theirs):
                name = "data made" if may_be_computed(ours[step], theirs[step]) else name
            return Fact("samples", step, said(name, who=who, step=step), name == "data made")
    return None


def _are_new(of_ranks: Sequence[tuple[Execution, Execution]], theirs: Steps) -> bool:
    """Whether the twin consumed none of the samples that differ in any step. `of_ranks`: the steps of run and twin."""
    other = set[object]()
    for one, twin in of_ranks:
        other |= (Samples(digests_of(one)) - Samples(digests_of(twin))).keys()
    return bool(other) and not total_of(theirs.values(), digests_of).keys() & other


def loads_fact(ours: History, twin: Record | None, after: range) -> Fact | None:
    """The first load that only one of run and twin made after one of these global steps."""
    if twin is None:
        return None
    mine, twins = (_loaded(history, after) for history in (ours, twin.history))
    alone = dict.fromkeys(twins - mine, "loaded there") | dict.fromkeys(mine - twins, "loaded here")
    step, name = min(alone, default=(0, ""))
    return Fact("loads", step + 1, said(alone[step, name], name=name, step=step)) if alone else None


def _loaded(history: History, after: range) -> set[tuple[int, str]]:
    """The global steps after which a rank loaded a file, with the file's name."""
    return {
        (step, posixpath.basename(load.path)) for load in history.loads
        if load.ok and (step := history.steps_done(load.rank, load.attempt, load.mono_s)) is not None and step in after
    }  # fmt: skip


def _all_samples(by_rank: Mapping[int, Execution]) -> list[str] | None:
    if not all(execution.samples_seen for execution in by_rank.values()):
        return None
    return sorted(str(sample) for execution in by_rank.values() for sample in execution.samples)


def skipped_update(since: Sequence[int], ours: Steps, theirs: Steps) -> Fact | None:
    """The first step that made an update in the run and not in the twin, or the other way round. A GradScaler skips an
    update if the gradients are not finite."""
    other = other_in(since, ours, theirs, "opt_step", "sched_step", "lr")
    near = sorted({*other, *(step - 1 for step in other)}.intersection(since))  # a schedule goes on after the step
    for step, run, twin in pairs(near, ours, theirs):
        if run.skipped != twin.skipped:
            return Fact("", step, said("skipped here" if run.skipped else "skipped there", step=step))
    return None


def no_update(since: Sequence[int], ours: Steps, theirs: Steps) -> Fact | None:
    """The first step that left the parameters as they were on all ranks, if it changed them in the twin."""

    def changed(steps: Steps, step: int) -> set[bool | None]:
        before = {rank: one.parameters for rank, one in steps.get(step - 1, {}).items()}
        return {
            None if None in (one.parameters, was := one.restored or before.get(rank)) else one.parameters != was
            for rank, one in steps[step].items()
        }

    found = (step for step in since if changed(ours, step) == {False} and changed(theirs, step) == {True})
    return next((Fact("update", step, said("no update", step=step)) for step in found), None)


def counter_fact(
    since: Sequence[int], ours: Steps, theirs: Steps, claim: str, read: Callable[[Execution], float | None], base: int
) -> Fact | None:  # fmt: skip
    """The first step after which the counter is not the twin's. None if the difference is just the number of steps that
    were skipped since the resume, as a GradScaler skips steps."""
    lacks: dict[int, tuple[int, int]] = {}  # by rank: the last step after which the counters differed, and by how much
    for step, run, twin in pairs(other_in(since, ours, theirs, "opt_step", "sched_step"), ours, theirs):
        mine, twins = read(run), read(twin)
        if mine is None or twins is None:
            continue
        before = lacks.get(run.rank, (0, 0))
        fewer = (before[1] if before[0] == step - 1 else 0) + run.skipped - twin.skipped
        lacks[run.rank] = step, fewer
        if mine not in (twins, twins - fewer):
            what = "learning rate" if claim == "schedule" else claim
            if mine <= step - base:  # it counts the steps since the resume
                return Fact(what, step, said(claim, ours=mine, theirs=twins, step=step))
            by = f"{abs(mine - twins):g} {'ahead' if mine > twins else 'behind'}"
            apart = "schedule apart" if claim == "schedule" else "optimizer apart"
            return Fact(what, step, said(apart, by=by, ours=mine, theirs=twins, step=step))
    return None


def pairs(since: Sequence[int], ours: Steps, theirs: Steps) -> Iterator[tuple[int, Execution, Execution]]:
    for step in since:
        for rank in sorted(ours[step].keys() & theirs[step].keys()):
            yield step, ours[step][rank], theirs[step][rank]


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
