"""How an assertion judges a job of several replicas. Pure.

One that can has a method `judge_replicas`, of the shape of `judge`; one of the functions here may be it. One that has
none can't: what it would make of ranks of several torchruns would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torchaos.harness.contracts import Assertion, Finding, Outcome, inconclusive
from torchaos.harness.judging.gaps.unseen import why_unplaced
from torchaos.harness.record.record import Record
from torchaos.harness.record.replicas import records_of

_WORST = (Outcome.FAILED, Outcome.INCONCLUSIVE, Outcome.PASSED)


def judged(assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    """What the assertion says of a job, of replicas or not."""
    if run.plan.job.replicas == 1:
        return assertion.judge(run, twins)
    across = getattr(assertion, "judge_replicas", None)
    if across is None:
        return inconclusive(
            f"{assertion.name} knows one torchrun's ranks, and can't judge a job of {run.plan.job.replicas} replicas"
        )
    found: Finding = across(run, twins)
    return found


def each(assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    """Of every replica by itself, with what that replica did in the twins. The bounds hold for each."""
    return _of(range(run.plan.job.replicas), assertion, run, twins)


def each_hit(assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    """The same of those that a fault was to hit."""
    hit = [number for number, one in enumerate(records_of(run)) if one.plan.faults]
    return _of(hit, assertion, run, twins)


def as_one(assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    """Of the whole job: what is asked of it has no ranks."""
    return assertion.judge(run, twins)


def _of(numbers: Iterable[int], assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    parts, theirs = records_of(run), [records_of(twin) for twin in twins]
    found = {number: assertion.judge(parts[number], [twin[number] for twin in theirs]) for number in numbers}
    if not found:
        return inconclusive("no fault was to hit any replica")
    worst = min(found, key=lambda number: _WORST.index(found[number].outcome))
    alike = len({(one.outcome, one.reason) for one in found.values()}) == 1 and len(found) > 1
    reason = f"{'each replica' if alike else f'replica {worst}'}: {found[worst].reason}"
    if found[worst].outcome is Outcome.PASSED and not alike:
        reason = "; ".join(f"replica {number}: {one.reason}" for number, one in found.items())
    return replace(found[worst], reason=reason)


def absences(parts: Sequence[Record]) -> Mapping[int, tuple[int, ...]]:
    """The replicas that had no part in a step that others made, by global step."""
    done = [{step for step, _rank in one.history.counting()} for one in parts]
    every = set().union(*done)
    gone = {step: tuple(number for number, own in enumerate(done) if step not in own) for step in sorted(every)}
    return {step: numbers for step, numbers in gone.items() if numbers}


def absent_in_words(parts: Sequence[Record]) -> str | None:
    """A sentence about the steps that were made without a replica; None where all had a part in all."""
    gone = absences(parts)
    if not gone:
        return None
    steps, who = list(gone), sorted({number for numbers in gone.values() for number in numbers})
    where = f"step {steps[0]} was" if len(steps) == 1 else f"{len(steps)} steps ({steps[0]} to {steps[-1]}) were"
    return f"{where} made without replica {' or '.join(map(str, who))}"


def why_no_steps(parts: Sequence[Record]) -> Finding | None:
    """What keeps the steps of replicas from being compared: one of them has none, or has some without a number."""
    for number, one in enumerate(parts):
        if not one.history.executions:
            return inconclusive(f"replica {number}: no step was seen")
        if one.history.unplaced:
            return inconclusive(f"replica {number}: {why_unplaced(one, one.history.unplaced)}")
    return None
