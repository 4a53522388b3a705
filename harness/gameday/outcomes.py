"""Decides the outcome of each fault of a round. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from torchaos.harness import registry
from torchaos.harness.contracts import Harm
from torchaos.harness.gameday.clock import steps_of, usual_s
from torchaos.harness.judging.landing.landings import Landing, landings
from torchaos.harness.judging.verdict.verdict import SPLIT_BRAIN
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Case, FaultResult, Recovery, Result, Verdict

_SLOWER = 1.5  # times the duration of the steps before the round's first fault
_SLOWER_S = 0.02  # and by at least this many seconds, because a small machine is noisy
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


# The worst first. A slow recovery is no outcome of its own: its times show it.
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
    """One outcome for each fault of the plan, in the order of the plan. A failed assertion belongs to the last fault
    that landed before the moment at which the job went wrong; if that moment is not known, to the last fault that was
    felt. A failure from before all faults belongs to none. Once the results of the job were damaged, nothing is known
    about the results of later faults."""
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
    """The failed cases about the job's behaviour, the worst first; of equally bad ones first the case that decided. A
    case that follows from another case went wrong when that case did."""
    failed = [case for case in result.cases if case.kind == "assertion" and case.verdict is Verdict.FAILED]
    roots = {case.name: case.at_s for case in failed}
    failed = [replace(case, at_s=roots.get(case.follows or "", case.at_s)) for case in failed]
    found = [(case, harm) for case in failed if (harm := _harm(case.name)) in _OF_HARM]
    order = list(_OF_HARM)
    return sorted(found, key=lambda one: (order.index(one[1]), one[0].name != result.decided_by, bool(one[0].follows)))


def _harm(name: str) -> Harm:
    if name == SPLIT_BRAIN:
        return Harm.WRONG_RESULT
    declared = registry.find("assertions", name).harm
    return Harm(declared) if declared in list(Harm) else Harm.OTHER


def _slower(run: Record, landed: Sequence[Landing]) -> tuple[str, str]:
    """The fault after which the job was smaller, or clearly slower, until the end, and a clause about it. Both are
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
            continue  # too few to tell: an earlier fault may be the cause
        now = usual_s(after) if len(after) > _FEW else 0.0
        if now <= max(_SLOWER * was, was + _SLOWER_S):
            break
        slow = landing.fault, f"a step takes {now:.3f} s, and took {was:.3f} s before"
    return slow
