"""Finds the most likely cause why a resumed job computes other values than its twin, from the other differences.

A quantity is said to differ or to agree only if it was seen. A quantity that was not seen is named, and stays a
possible cause. State that the resume restored exactly (`state_restored` passes) is no cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torchaos.harness.judging.checkpoints.carried import carried_into
from torchaos.harness.judging.noise.quantities import Steps, relative
from torchaos.harness.judging.twins.agreement import Difference
from torchaos.harness.judging.twins.samples import renumbered
from torchaos.harness.record.history import Execution, History, Segment, StepTable
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import Both
from torchaos.harness.record.steps.columns import lengths

_Counter = Callable[[Execution], float | None]
_UPDATE = (
    "optimizer counter",
    "learning rate",
)  # they act in the update, so they change only the losses of later steps


_MOMENTS = "optimizer's moments at the start"
_SETTLED = 5  # steps: a job that is not deterministic differs from its twin earlier


class _Fact(NamedTuple):
    """A quantity that differs from the twin's."""

    quantity: str  # empty: the clause itself proves the cause
    step: int  # global; the first step in which it differs
    clause: str


class Cause(NamedTuple):
    """The most likely cause of a difference from the twin."""

    words: str  # a sentence about the attempt with the first difference
    short: str = ""  # the cause alone; empty if it is not known


def likeliest_cause(run: Record, history: History, ours: Steps, theirs: Steps, first: Difference) -> Cause:
    """The most likely cause of the first difference. `history`: the run's history, from its agent or from its log.
    `ours`, `theirs`: the steps of the run and of its first twin."""
    part = _part_of(history, next(iter(ours[first.step].values())))
    if part is None or part.base is None:
        return Cause("The step from which that attempt continued is not known, and so the cause is not known either.")
    base, later = (
        part.base,
        any(segment.number == part.number and segment.after < part.after for segment in history.segments),
    )
    if base == 0 and part is history.segments[0]:
        return Cause(_without_a_restart(sum(step < first.step for step in ours.keys() & theirs.keys())))
    since = [step for step in sorted(ours.keys() & theirs.keys()) if base < step <= first.step]
    carried = None if later else carried_into(run, part.number)
    weights = {} if carried and carried.parameters else _weights(base, ours, theirs)
    moments = bool(carried and carried.moments)
    began = "after the job went back to step" if later else "in the attempt that resumed after step"
    where = f"{began} {base}"
    exact = [_accumulation(base, ours, theirs, first), _loss_scale(ours, theirs, first), _lost(base, weights)]
    facts = [_Fact("", first.step, clause) for clause in exact if clause]
    facts += [fact for fact in (_data(since, ours, theirs), _optimizer(since, ours, theirs, moments),
                                _schedule(since, ours, theirs)) if fact]  # fmt: skip
    late = [fact for fact in facts if fact.quantity in _UPDATE and fact.step == first.step and first.what == "loss"]
    acted = [fact.clause for fact in facts if fact not in late]
    besides = f" Besides, {'; '.join(fact.clause for fact in late)}." if late else ""
    if acted:
        causes = "; ".join(acted)
        return Cause(f"Most likely cause, {where}: {causes}.{besides}", causes)
    differ = {fact.quantity for fact in facts}
    seen = [what for what in _compared(since, ours, theirs, weights, moments) if what not in differ]
    guess = _by_elimination(base, ours, theirs, first, weights, seen)
    same = f"all other compared quantities are equal ({', '.join(seen)}), so " if seen else ""
    unseen = "" if "samples" in seen else " (the samples were not seen)"
    return Cause(f"{where[0].upper()}{where[1:]}, {same}{guess}{unseen}.{besides}", guess)


def _part_of(history: History, execution: Execution) -> Segment | None:
    """The segment of the history to which a step belongs."""
    where = execution.attempt, execution.segment
    return next((part for part in history.segments if (part.number, part.after) == where), None)


def _without_a_restart(agreed: int) -> str:
    """A sentence about a job that was not restarted before the difference, after `agreed` steps without one."""
    if agreed < _SETTLED:
        return (
            "The job had not been restarted by then: either the fault itself changed the numbers, or the job is not "
            "deterministic."
        )
    return (
        f"The job had not been restarted by then, and the {agreed} steps before agree: most likely the fault, or what "
        "the job did about it, changed the numbers."
    )


def _accumulation(base: int, ours: Steps, theirs: Steps, first: Difference) -> str | None:
    if first.what != "number of losses" or first.step != base + 1 or (first.ours or 0) >= (first.theirs or 0):
        return None
    mine, twins = ours[first.step], theirs[first.step]
    if not all(_is_end_of(mine[rank].samples, twins[rank].samples) for rank in mine.keys() & twins.keys()):
        return None
    return (
        f"gradient accumulation: the first step had {first.ours:g} backwards and {first.theirs:g} in the twin, as if "
        "the checkpoint was written in the middle of an accumulation, without its gradients"
    )


def _is_end_of(part: Sequence[str | None], whole: Sequence[str | None]) -> bool:
    """Whether a step did only the rest of another step, as far as its samples were seen."""
    pairs = zip(reversed(part), reversed(whole), strict=False)
    return len(part) <= len(whole) and all(None in pair or pair[0] == pair[1] for pair in pairs)


def _loss_scale(ours: Steps, theirs: Steps, first: Difference) -> str | None:
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
    return (
        f"the loss scale (GradScaler) was not restored: every loss of step {first.step} is exactly {factor:g} times "
        "the twin's"
    )


def _weights(base: int, ours: Steps, theirs: Steps) -> dict[int, str] | None:
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
    as_new = {rank for rank, done in begun.items() if rank in fresh and done.restored == fresh[rank].restored}
    return {
        rank: "were those of a fresh start" if rank in as_new else "were others"
        for rank, done in begun.items()
        if done.restored != due[rank]
    }


def _lost(base: int, weights: dict[int, str] | None) -> str | None:
    if not weights:
        return None
    kinds = [(words, [rank for rank in weights if weights[rank] == words]) for words in dict.fromkeys(weights.values())]
    clauses = " and ".join(f"those of rank {_list(ranks)} {words}" for words, ranks in kinds)
    return f"the model's weights were not restored: before step {base + 1} {clauses}"


def _other_in(since: Sequence[int], ours: Steps, theirs: Steps, *columns: str) -> list[int]:
    """The steps of `since` in which one of these columns may differ on some rank."""
    both = Both.of(StepTable.of(ours).at(since), StepTable.of(theirs).at(since))
    other = np.any([~both.equal(column) for column in columns], axis=0)
    return sorted({*both.ours.numbers[both.ours.any(other)].tolist(), *both.apart.tolist()})


def _data(since: Sequence[int], ours: Steps, theirs: Steps) -> _Fact | None:
    for step in _other_in(since, ours, theirs, "samples", "in_samples"):
        if ours[step].keys() != theirs[step].keys():
            mine, twins = _all_samples(ours[step]), _all_samples(theirs[step])
            if mine is not None and twins is not None and mine != twins:
                return _Fact("samples", step, f"the data: all ranks together were given other samples in step {step}")
            continue
        for rank, execution in sorted(ours[step].items()):
            their = theirs[step][rank]
            if execution.samples_seen and their.samples_seen and execution.samples != their.samples:
                if execution.indices and execution.indices == their.indices and not renumbered(ours, theirs):
                    return _Fact("samples", step, (
                        f"an RNG: rank {rank} was given the right samples with other contents in step {step}, as if "
                        "the RNG of the augmentation was not restored"
                    ))  # fmt: skip
                return _Fact("samples", step, f"the data order: rank {rank} was given other samples in step {step}")
    return None


def _all_samples(by_rank: Mapping[int, Execution]) -> list[str] | None:
    if not all(execution.samples_seen for execution in by_rank.values()):
        return None
    return sorted(str(sample) for execution in by_rank.values() for sample in execution.samples)


def _optimizer(since: Sequence[int], ours: Steps, theirs: Steps, moments: bool) -> _Fact | None:
    state = "a part of the optimizer's state" if moments else "the optimizer's state"
    return _counter(since, ours, theirs, "optimizer counter", state, lambda step: step.opt_step)


def _schedule(since: Sequence[int], ours: Steps, theirs: Steps) -> _Fact | None:
    counted = _counter(since, ours, theirs, "learning rate", "the LR schedule", lambda step: step.sched_step)
    if counted:
        return counted
    for step, run, twin in _pairs(_other_in(since, ours, theirs, "lr"), ours, theirs):
        for mine, twins in zip(run.lr, twin.lr, strict=False):
            if relative(mine, twins) > 1e-9:
                counted_on = run.sched_step is not None and run.sched_step == twin.sched_step
                lost = "the optimizer's learning rate" if counted_on else "the LR schedule"
                more = ", although the counter of the LR schedule was" if counted_on else ""
                clause = f"{lost} was not restored{more}: {mine:g} instead of {twins:g} in step {step}"
                return _Fact("learning rate", step, clause)
    return None


def _counter(since: Sequence[int], ours: Steps, theirs: Steps, what: str, state: str, read: _Counter) -> _Fact | None:
    for step, run, twin in _pairs(_other_in(since, ours, theirs, "opt_step", "sched_step"), ours, theirs):
        mine, twins = read(run), read(twin)
        if mine is not None and twins is not None and mine != twins:
            counts = f"its own step counter stood at {mine:g} after step {step}, and at {twins:g} in the twin"
            return _Fact(what, step, f"{state} was not restored: {counts}")
    return None


def _pairs(since: Sequence[int], ours: Steps, theirs: Steps) -> Iterator[tuple[int, Execution, Execution]]:
    for step in since:
        for rank in sorted(ours[step].keys() & theirs[step].keys()):
            yield step, ours[step][rank], theirs[step][rank]


def _compared(
    since: Sequence[int], ours: Steps, theirs: Steps, weights: Mapping[int, str] | None, moments: bool
) -> list[str]:
    """The quantities that were seen on all ranks of all these steps, in the run and in the twin."""
    mine, twins = StepTable.of(ours).at(since), StepTable.of(theirs).at(since)
    same_ranks, both = not len(Both.of(mine, twins).apart), (mine.executions, twins.executions)
    seen = {
        "samples": all(steps.samples_seen.all() for steps in both),
        "weights at the start": weights is not None,
        _MOMENTS: moments,
        "optimizer counter": same_ranks and not any(np.isnan(steps.column("opt_step")).any() for steps in both),
        "learning rate": same_ranks and all((lengths(steps.column("lr")) > 0).all() for steps in both),
    }
    return [what for what, is_seen in seen.items() if is_seen]


def _by_elimination(
    base: int, ours: Steps, theirs: Steps, first: Difference, weights: Mapping[int, str] | None, seen: Sequence[str]
) -> str:
    """A clause about the most likely cause if every recorded quantity agrees. The cause was then not recorded. `seen`:
    the quantities that were compared."""
    if first.what == "number of losses":
        return "nothing that was recorded explains why it had another number of backwards"
    data = [] if "samples" in seen else ["the data order"]
    update = ["gradient clipping"] if _MOMENTS in seen else ["optimizer state (momentum)"]
    acts = _or(*update, "gradient scaling", *data)
    agreed = first.step - base - 1
    if agreed == 1:
        return f"most likely, state that acts in the update was not restored, since the first loss agrees: {acts}"
    if agreed:
        return f"since the first {agreed} losses agree, it is something that shows late: {acts}, or a later fault"
    if weights is None and _like_the_start(ours, first):
        nearer = "the loss is nearer to that of the start than to the twin's"
        return f"most likely the model's weights were not restored: {nearer}"
    mine, twins = ours[first.step], theirs[first.step]
    differ = [rank for rank in sorted(mine) if rank in twins and mine[rank].losses != twins[rank].losses]
    if 0 < len(differ) < len(mine):
        own = _or("the RNG state (dropout)", *data)
        return f"since only rank {_list(differ)} differs, most likely {own} of that rank was not restored"
    others = [] if weights is not None else ["the model's weights"]
    return f"most likely {_or('the RNG state (dropout)', *others, *data)} was not restored"


def _like_the_start(ours: Steps, first: Difference) -> bool:
    """Whether the first loss that differs is nearer to the run's first loss of all than to the twin's loss in that
    step."""
    start = ours.get(min(ours), {}).get(first.rank or 0)
    if start is None or not start.loss_seen or first.ours is None or first.theirs is None or min(ours) == first.step:
        return False
    return abs(first.ours - (start.losses[0] or 0.0)) < abs(first.ours - first.theirs)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _or(*names: str) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
