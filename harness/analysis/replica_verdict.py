"""Judges a job of several replicas, each with its own torchrun.

An assertion that can judge such a job has a method `judge_replicas`, which often calls one of the functions here. Any
other assertion is inconclusive for such a job, because it would mix up the ranks of different torchruns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from torchaos.harness.analysis.missing_data import why_unplaced, why_unseen
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Finding, Need, Outcome, inconclusive
from torchaos.harness.record.history import Attempt, Execution, Executions, History
from torchaos.harness.record.history.step_evidence import RECORD, START, STATE
from torchaos.harness.record.record import Record, ranks_of
from torchaos.harness.record.record import without_steps as without_those_of_steps
from torchaos.harness.record.steps.execution import with_values

_REQUIRED = {
    Need.STEPS: ("no step was", "steps"), Need.LOSS: ("no loss was", "loss"),
    Need.SAMPLES: ("no sample was", "samples"), Need.STATE: ("no parameters were", "parameters"),
}  # fmt: skip
_WORST = (Outcome.FAILED, Outcome.INCONCLUSIVE, Outcome.PASSED)


def judged(assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    """The finding of an assertion about a job with or without replicas. Inconclusive if the assertion can't judge
    replicas."""
    if run.plan.job.replicas > 1:
        return assertion.judge_replicas(run, twins)
    found = ask(assertion, run, twins)
    alone = ranks_alone(run, twins) if found.outcome is Outcome.INCONCLUSIVE else {}
    judges_parts = type(assertion).judge_replicas is not Assertion.judge_replicas
    return _worst("rank", assertion, alone) if alone and judges_parts else found


Parts = Mapping[int, tuple[Record, Sequence[Record]]]  # by number: of the run, and of its twins


def ranks_alone(run: Record, twins: Sequence[Record]) -> Parts:
    """Each rank as a job of its own, if the ranks have no common step after a restart, because they make different
    numbers of steps. Empty if they have a common step, or if a rank's own state or file does not show from which of its
    own steps it continued."""
    if not (run.history.uneven and run.history.unplaced):
        return {}
    if not all(_is_shown(attempt) for own in run.of_ranks.values() for attempt in own.history.attempts):
        return {}
    theirs = [twin.of_ranks for twin in twins]
    if any(twin.keys() != run.of_ranks.keys() for twin in theirs):
        return {}
    return {rank: (own, [twin[rank] for twin in theirs]) for rank, own in run.of_ranks.items()}


def _is_shown(attempt: Attempt) -> bool:
    shown = [witness for witness in attempt.witnesses if witness.name in (STATE, RECORD, START) and witness.trust == 1]
    return len(attempt.segments) == 1 and any(witness.fits == (attempt.base,) for witness in shown)


def ask(assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    """The finding of the assertion's `judge`; inconclusive if data was not seen that the assertion requires."""
    missing = (lacking(run, need) for need in assertion.requires)
    return next(filter(None, missing), None) or assertion.judge(run, twins)


def lacking(run: Record, need: Need) -> Finding | None:
    """An inconclusive finding if the run has no such data: steps, losses, samples or parameters. None otherwise."""
    made, (words, what) = run.history.executions, _REQUIRED[need]
    if need is Need.STEPS:
        seen = bool(made)
    elif need is Need.STATE:
        seen = any(one.parameters for one in made.with_state)
    else:
        seen = bool((made.loss_seen if need is Need.LOSS else made.samples_seen).any())
    return None if seen else inconclusive(f"{words} seen: {why_unseen(run, what)}")


def each(assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    """Judges each replica alone, against the same replica of the twins, and returns the worst finding."""
    return _of(range(run.plan.job.replicas), assertion, run, twins)


def each_hit(assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    """Judges each replica that a fault was planned to hit, as `each` does, and returns the worst finding."""
    hit = [number for number, replica in enumerate(run.of_replicas) if replica.plan.faults]
    return _of(hit, assertion, run, twins)


def as_one(assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    """Judges the whole job at once, for assertions that do not depend on ranks."""
    return ask(assertion, run, twins)


def _of(numbers: Iterable[int], assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    theirs = [twin.of_replicas for twin in twins]
    parts = {number: (run.of_replicas[number], [twin[number] for twin in theirs]) for number in numbers}
    return _worst("replica", assertion, parts) if parts else inconclusive("no fault was to hit any replica")


def _worst(noun: str, assertion: Assertion, parts: Parts) -> Finding:
    """The worst finding about parts of a job; of several failures, that of the part that failed first. `noun`: what a
    part is."""
    found = {number: ask(assertion, part, twins) for number, (part, twins) in parts.items()}
    worst = min(
        found, key=lambda number: (_WORST.index(found[number].outcome), _wrong_s(parts[number][0], found[number]))
    )
    alike = len({(finding.outcome, finding.reason) for finding in found.values()}) == 1 and len(found) > 1
    reason = f"{f'each {noun}' if alike else f'{noun} {worst}'}: {found[worst].reason}"
    if found[worst].outcome is Outcome.PASSED and not alike:
        reason = "; ".join(f"{noun} {number}: {finding.reason}" for number, finding in found.items())
    return replace(found[worst], reason=reason)


def _wrong_s(part: Record, finding: Finding) -> float:
    """When a part of a job went wrong, CLOCK_MONOTONIC, as far as that is known."""
    made = part.history.by_step().get(finding.first.step, {}) if finding.first else {}
    return min((one.mono_s for one in made.values()), default=inf if finding.at_s is None else finding.at_s)


def as_one_job(run: Record) -> Record:
    """The replicas as one job whose number of ranks changes: an attempt lasts as long as the same replicas make the
    steps. The record has only the steps that count, and no other event of steps, samples or checkpoints."""
    of_step: dict[int, list[Execution]] = {}
    for number, part in enumerate(run.of_replicas):
        first = ranks_of(run.plan.job, number).start
        for one in part.history.by_step().executions:
            step = one.global_step or 0
            placed = {"rank": first + one.rank, "local_step": step, "segment": 0}
            of_step.setdefault(step, []).append(with_values(one, placed))
    attempts, made, there = list[Attempt](), list[Execution](), set[int]()
    for step, together in sorted(of_step.items()):
        if there != (there := {one.rank for one in together}):
            begun_s = min(one.mono_s for one in together)
            base = None if attempts else step - 1  # later, nothing is resumed
            attempts.append(Attempt(len(attempts), 0, {}, begun_s, None, len(there), base))
        made += [with_values(one, {"attempt": len(attempts) - 1}) for one in together]
    made.sort(key=lambda one: (one.attempt, one.mono_s))
    whole = replace(without_those_of_steps(run))
    vars(whole)["history"] = History(
        tuple(attempts), Executions.of(made), (), (), "agent"
    )  # it can't be made of events
    return whole


def absences(parts: Sequence[Record]) -> Mapping[int, tuple[int, ...]]:
    """By global step: the replicas that did not take part, in steps that other replicas made."""
    done = [set(replica.history.by_step()) for replica in parts]
    every = set().union(*done)
    gone = {step: tuple(number for number, own in enumerate(done) if step not in own) for step in sorted(every)}
    return {step: numbers for step, numbers in gone.items() if numbers}


# For reasons: in a job whose replicas keep to their own samples, no weights show it.
SCALE_UNJUDGED = "by what number the others divided their gradients meanwhile is not judged"


def absent_replicas(run: Record) -> str | None:
    """A sentence about the steps that were made without one of the replicas. None if all replicas made all steps."""
    gone = absences(run.of_replicas)
    if not gone:
        return None
    steps, who = list(gone), sorted({number for numbers in gone.values() for number in numbers})
    where = f"step {steps[0]} was" if len(steps) == 1 else f"{len(steps)} steps ({steps[0]} to {steps[-1]}) were"
    return f"{where} made without replica {' or '.join(map(str, who))}"


def without_steps(run: Record) -> Finding | None:
    """An inconclusive finding if the steps of the replicas can't be compared, because a replica has no steps, or has
    steps without a global number. None otherwise."""
    for number, replica in enumerate(run.of_replicas):
        if not replica.history.executions:
            return inconclusive(f"replica {number}: no step was seen")
        if replica.history.unplaced:
            return inconclusive(f"replica {number}: {why_unplaced(replica, replica.history.unplaced)}")
    return None
