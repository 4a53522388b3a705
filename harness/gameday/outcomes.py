"""Decides the outcome of each fault of a round. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from torchaos.harness import registry
from torchaos.harness.contracts import Harm
from torchaos.harness.gameday.clock import steps_of, usual_s
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


def outcomes_of(run: Record, result: Result) -> list[FaultOutcome]:
    """One outcome for each fault of the plan. A failed assertion belongs to the last fault that needed a recovery,
    because the job had recovered from all faults before it."""
    recoveries: dict[str, Recovery] = {}
    for recovery in result.recoveries:  # the worst outcome of a fault that landed several times
        recoveries[recovery.fault] = max(recoveries.get(recovery.fault, recovery), recovery, key=_badness)
    found = [_of(fault, recoveries.get(fault.id)) for fault in result.faults]
    for case, harm in _wrong(result):
        at = next((n for n in reversed(range(len(found))) if found[n].outcome is not Outcome.UNPROVED), None)
        if at is not None and found[at].outcome is Outcome.RECOVERED:
            found[at] = _with(found[at], _OF_HARM[harm], f"{case.name}: {case.reason}")
    slower = _slower(run)
    if slower and found and found[-1].outcome is Outcome.RECOVERED:
        found[-1] = _with(found[-1], Outcome.DEGRADED, slower)
    return found


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
    return FaultOutcome(fault.id, fault.inject, outcome, reason, parts, lost)


def _wrong(result: Result) -> list[tuple[Case, Harm]]:
    """The failed cases about the job's behaviour, the worst first."""
    failed = [case for case in result.cases if case.kind == "assertion" and case.verdict is Verdict.FAILED]
    found = [(case, harm) for case in failed if (harm := _harm(case.name)) in _OF_HARM]
    return sorted(found, key=lambda one: list(_OF_HARM).index(one[1]))


def _harm(name: str) -> Harm:
    if name == SPLIT_BRAIN:
        return Harm.WRONG_RESULT
    declared = registry.find("assertions", name).harm
    return Harm(declared) if declared in list(Harm) else Harm.OTHER


def _with(fault_outcome: FaultOutcome, outcome: Outcome, reason: str) -> FaultOutcome:
    return FaultOutcome(
        fault_outcome.id, fault_outcome.inject, outcome, reason, fault_outcome.parts, fault_outcome.lost_steps
    )


def _slower(run: Record) -> str:
    """A clause if the job was clearly slower, or smaller, after the last recovery than before the first fault; else
    empty."""
    attempts = [attempt for attempt in run.history.attempts if attempt.first_step is not None]
    if attempts and attempts[-1].world_size < attempts[0].world_size:
        return f"the job went on with {attempts[-1].world_size} of {attempts[0].world_size} ranks"
    hits = [event.mono_s for event in run.beside_steps if event.kind.value == "fault.applying"]
    steps = steps_of(run.history)
    before = [step for step in steps if hits and step.at_s < min(hits)]
    after = [step for step in steps if step.attempt == steps[-1].attempt and hits and step.at_s > max(hits)][
        -2 * _FEW :
    ]
    if len(before) <= _FEW or len(after) <= _FEW:
        return ""
    was, now = usual_s(before), usual_s(after)
    return f"a step takes {now:.3f} s, and took {was:.3f} s before" if now > max(_SLOWER * was, was + _SLOWER_S) else ""
