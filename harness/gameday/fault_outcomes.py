"""Decides the outcome of each fault of a round, and divides the wall-clock time of a round into classes. Pure.

The divided time begins with the end of the round's first step, because the start of the job belongs to no fault. It
ends with the last step, or with the end of the run if the job got stuck. The classes:

    productive   steps of the final history
    lost         steps that were done again later
    checkpoint   training stood still to save
    stalled      the excess time of a step that took longer than LONG usual steps
    down         from the last step of an attempt to the first step of the next attempt

ETTR = productive / wall (Meta, arXiv 2410.21680: productive runtime by wall-clock time; ByteRobust, arXiv 2509.16293).
Runtime goodput = (training - lost) / wall, in which saving and stalls count as training (Google's ML goodput)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import pairwise
from math import inf
from statistics import median

from torchaos.harness.analysis.checkpointing.save_schedule import standstill
from torchaos.harness.analysis.hit_targets import Landing, landings
from torchaos.harness.analysis.recovery_times import on_until_s
from torchaos.harness.analysis.verdict import harm_of
from torchaos.harness.interfaces import Harm
from torchaos.harness.record.history import Executions, History
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Case, FaultResult, Recovery, Result, Verdict

LONG = 3.0  # times the usual step


@dataclass(frozen=True)
class Clock:
    """The seconds of wall-clock time in each class. `wall_s` is their sum."""

    productive_s: float = 0.0
    lost_s: float = 0.0
    checkpoint_s: float = 0.0
    stalled_s: float = 0.0
    down_s: float = 0.0

    @property
    def wall_s(self) -> float:
        return float(sum(getattr(self, item.name) for item in fields(self)))

    @property
    def ettr(self) -> float | None:
        return self.productive_s / self.wall_s if self.wall_s else None

    @property
    def goodput(self) -> float | None:
        return (self.wall_s - self.down_s - self.lost_s) / self.wall_s if self.wall_s else None

    def __add__(self, other: Clock) -> Clock:
        return Clock(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(frozen=True)
class Ended:
    """A step that all ranks have done. `at_s`: when the last rank ended it (CLOCK_MONOTONIC). `counts`: whether it
    belongs to the final history."""

    attempt: int
    local_step: int
    at_s: float
    counts: bool


def saves_under_fault(run: Record) -> set[tuple[int, int]]:
    """The (attempt, local step) of each save during which a fault was on. The duration of such a save is no measure of
    saves."""
    on = [(one.at_s, until if (until := on_until_s(run, one)) < inf else one.at_s) for one in landings(run)]
    return {
        (save.attempt, save.local_step)
        for save in run.history.saves
        if any(since <= (save.ended_s or save.begun_s) and save.begun_s <= until for since, until in on)
    }


def clock_of(run: Record) -> Clock:
    """The seconds in each class. A save during which a fault was on counts only as long as a usual save; the rest of
    its time is stalled."""
    steps = steps_of(run.history)
    if not steps:
        return Clock()
    usual = usual_s(steps)
    saving, hit = dict(standstill(run.history).blocked), saves_under_fault(run)
    if others := [blocked for key, blocked in saving.items() if key not in hit]:
        saving |= {key: min(saving[key], median(others)) for key in hit & saving.keys()}
    found = Clock()
    for before, after in pairwise(steps):
        took = after.at_s - before.at_s
        if after.attempt != before.attempt:
            found += Clock(down_s=took)
            continue
        saved = min(saving.get((after.attempt, before.local_step), 0.0), took)
        stalled = max(0.0, took - saved - usual) if took - saved > LONG * usual else 0.0
        rest = took - saved - stalled
        found += Clock(
            rest if after.counts else 0.0, 0.0 if after.counts else rest, saved if after.counts else 0.0, stalled
        )
        if not after.counts:
            found += Clock(lost_s=saved)
    return found + Clock(down_s=_stuck_s(run, steps[-1].at_s))


def steps_of(history: History) -> list[Ended]:
    """The steps of each attempt, in order of time. A step ends when its last rank has done it."""
    counting = set(_each(history.by_step().executions))
    ends: dict[tuple[int, int], float] = {}
    for key, at_s in zip(_each(history.executions), history.executions.mono_s.tolist(), strict=True):
        ends[key] = max(ends.get(key, 0.0), at_s)
    found = [Ended(attempt, step, at_s, (attempt, step) in counting) for (attempt, step), at_s in ends.items()]
    return sorted(found, key=lambda one: one.at_s)


def _each(steps: Executions) -> Iterator[tuple[int, int]]:
    return zip(steps.attempt.tolist(), steps.local_step.tolist(), strict=True)


def usual_s(steps: list[Ended]) -> float:
    """The median step in seconds; 0 if there are too few steps."""
    gaps = [b.at_s - a.at_s for a, b in pairwise(steps) if a.attempt == b.attempt]
    return median(gaps) if gaps else 0.0


def _stuck_s(run: Record, last_s: float) -> float:
    """The seconds from the last step to the end of the run, in which the job was down or stood still. 0 if the run
    ended on purpose."""
    if run.stopped is not None:
        return 0.0 if run.ended_on_purpose else max(0.0, run.stopped.mono_s - last_s)
    return max(0.0, run.exited.mono_s - last_s) if run.exited and run.exit_code not in (0, None) else 0.0


_SLOWER = 1.5  # times the step duration before the round's first fault
_SLOWER_S = 0.02  # and at least this many seconds more, because a small machine is noisy
_FEW = 10  # so many steps are needed to measure the duration of a step


class Outcome(str, Enum):
    RECOVERED = "recovered"
    DEGRADED = "degraded"  # it continued, slower or with fewer ranks
    LOST_WORK = "lost work"  # it continued from a checkpoint that was not the newest
    DAMAGED = "silent damage"  # it continued, and computes wrong results
    STUCK = "stuck"  # it never made more steps than before the fault
    OTHERWISE = "failed otherwise"  # it continued, and an assertion about another behaviour failed
    UNPROVED = "unproved"  # the fault did not land, or nothing shows that it was felt
    UNJUDGED = "not judged"  # the job came back, and nothing shows whether its results are right


# The worst first. There is no outcome for a slow recovery: its times show it.
_OF_HARM = {
    Harm.WRONG_RESULT: Outcome.DAMAGED, Harm.LOST_WORK: Outcome.LOST_WORK, Harm.REACTION: Outcome.OTHERWISE,
    Harm.ENDING: Outcome.OTHERWISE, Harm.OTHER: Outcome.OTHERWISE,
}  # fmt: skip


@dataclass(frozen=True)
class FaultOutcome:
    id: str
    inject: str
    outcome: Outcome
    reason: str
    parts: Mapping[str, float | None]  # times of the recovery, in seconds since the fault
    lost_steps: int | None = None
    at_s: float | None = None  # as in Recovery


def outcomes_of(run: Record, result: Result) -> list[FaultOutcome]:
    """One outcome for each fault, in the order of the plan.

    A failed assertion belongs to the last fault that landed before the job went wrong. If that time is not known, it
    belongs to the last fault that was felt; if the job was wrong before all faults, to none. Once a fault has damaged
    the results of the job, nothing is known about the results after later faults."""
    recoveries: dict[str, Recovery] = {}
    for recovery in result.recoveries:  # the worst outcome of a fault that landed several times
        recoveries[recovery.fault] = max(recoveries.get(recovery.fault, recovery), recovery, key=_badness)
    found = {fault.id: _of(fault, recoveries.get(fault.id)) for fault in result.faults}
    landed = [landing for landing in landings(run) if landing.fault in found]
    before = ""
    for case, harm in _wrong(result):
        blamed = _blamed(case, found, landed, run)
        if blamed is None and case.at_s is not None and harm is Harm.WRONG_RESULT:
            before = before or f"the results of the job were wrong before any fault: {case.name}: {case.reason}"
        fault = found.get(blamed or "")
        if fault and fault.outcome is Outcome.RECOVERED:
            found[fault.id] = replace(fault, outcome=_OF_HARM[harm], reason=f"{case.name}: {case.reason}")
    began = {landing.fault: landing.at_s for landing in reversed(landed)}
    damaged = [fault for fault in found.values() if fault.outcome is Outcome.DAMAGED]
    first = min(damaged, key=lambda one: began.get(one.id, inf), default=None)
    for fault in found.values():
        later = first is not None and began.get(fault.id, 0.0) > began.get(first.id, inf)
        if fault.outcome is Outcome.RECOVERED and (before or later):
            reason = before or f"it came after {first.id if first else ''}, which had damaged the results of the job"
            found[fault.id] = replace(fault, outcome=Outcome.UNJUDGED, reason=reason)
    slow, why = _slower(run, landed)
    if slow in found and found[slow].outcome is Outcome.RECOVERED:
        found[slow] = replace(found[slow], outcome=Outcome.DEGRADED, reason=why)
    return list(found.values())


def _blamed(case: Case, found: Mapping[str, FaultOutcome], landed: Sequence[Landing], run: Record) -> str | None:
    """The fault to which a failed case belongs; None if it belongs to none."""
    if case.at_s is None:
        return next((one.id for one in reversed([*found.values()]) if one.outcome is not Outcome.UNPROVED), None)
    before = [landing for landing in landed if round(landing.at_s - run.events[0].mono_s, 6) <= case.at_s]
    return before[-1].fault if before else None


def _badness(recovery: Recovery) -> tuple[bool, float, float]:
    caught_up = recovery.parts.get("caught_up")
    return caught_up is None, float(recovery.lost_steps or 0), caught_up or 0.0


def _of(fault: FaultResult, recovery: Recovery | None) -> FaultOutcome:
    parts, lost = (recovery.parts, recovery.lost_steps) if recovery else ({}, None)
    outcome, reason = Outcome.RECOVERED, fault.evidence or ""
    if fault.applied is None or fault.verdict is Verdict.INCONCLUSIVE:
        outcome, reason = Outcome.UNPROVED, fault.reason
    elif fault.verdict is Verdict.FAILED or parts.get("caught_up") is None:
        outcome, reason = Outcome.STUCK, fault.reason
    return FaultOutcome(fault.id, fault.inject, outcome, reason, parts, lost, recovery.at_s if recovery else None)


def _wrong(result: Result) -> list[tuple[Case, Harm]]:
    """The failed cases about the job's behaviour, the worst first; of equally bad cases, first the case that decided.
    If a case follows from another case, its time is that of the other."""
    failed = result.assertions(Verdict.FAILED)
    roots = {case.name: case.at_s for case in failed}
    failed = [replace(case, at_s=roots.get(case.follows or "", case.at_s)) for case in failed]
    found = [(case, harm) for case in failed if (harm := harm_of(case.name)) in _OF_HARM]
    order = list(_OF_HARM)
    return sorted(found, key=lambda one: (order.index(one[1]), one[0].name != result.decided_by, bool(one[0].follows)))


def _slower(run: Record, landed: Sequence[Landing]) -> tuple[str, str]:
    """The fault from which on the job was smaller, or clearly slower, until the end; and a clause about it. Both are
    empty if there is none."""
    attempts = [attempt for attempt in run.history.attempts if attempt.first_step is not None]
    if not landed or not attempts:
        return "", ""
    steps = steps_of(run.history)
    if attempts[-1].world_size < attempts[0].world_size:
        whole = max(place for place, one in enumerate(attempts) if one.world_size > attempts[-1].world_size)
        began_s = min(step.at_s for step in steps if step.attempt == attempts[whole + 1].number)
        cause = [landing for landing in landed if landing.at_s < began_s] or landed[:1]
        return cause[-1].fault, f"the job went on with {attempts[-1].world_size} of {attempts[0].world_size} ranks"
    before = [step for step in steps if step.at_s < landed[0].at_s]
    if len(before) <= _FEW:
        return "", ""
    was, slow = usual_s(before), ("", "")
    for landing, end_s in reversed([*zip(landed, [*(one.at_s for one in landed[1:]), inf], strict=True)]):
        after = [step for step in steps if landing.at_s < step.at_s < end_s]
        after = [step for step in after if step.attempt == after[-1].attempt][-2 * _FEW :]
        if len(after) <= _FEW and end_s < inf:
            continue  # too few steps to tell: an earlier fault may be the cause
        now = usual_s(after) if len(after) > _FEW else 0.0
        if now <= max(_SLOWER * was, was + _SLOWER_S):
            break
        slow = landing.fault, f"a step takes {now:.3f} s, and took {was:.3f} s before"
    return slow
