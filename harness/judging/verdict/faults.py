"""The result of each fault: whether it landed as planned, was felt, and was outlived. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.contracts import ChaosError, Evidence
from torchaos.harness.judging.gaps.unseen import ended_before_steps, why_unseen
from torchaos.harness.judging.landing.whom import hit_target
from torchaos.harness.judging.verdict.gates import landed_wrong, not_outlived
from torchaos.harness.record.plan import ENDED_BEFORE, PlannedFault
from torchaos.harness.record.record import Record
from torchaos.harness.record.replicas import records_of as replicas_of
from torchaos.harness.record.result import Case, FaultResult, Verdict
from torchaos.harness.record.words import moment_in_words, target_in_words
from torchaos.harness.registry import injector_of


def fault_result(run: Record, twins: Sequence[Record], fault: PlannedFault, must_recover: bool) -> FaultResult:
    """The result of a fault. In a job of replicas: the worst result of the replicas that the fault was planned to hit;
    the other replicas must end successfully."""
    if run.plan.job.replicas == 1:
        return _judge_fault(run, twins, fault, must_recover)
    theirs, found, others = [replicas_of(twin) for twin in twins], {}, []
    for number, replica in enumerate(replicas_of(run)):
        own = next((own for own in replica.plan.faults if own.id == fault.id), None)
        if own is None:
            others += [(number, e.data["exit_code"]) for e in replica.of_kind(Kind.JOB_EXITED) if e.data["exit_code"]]
        else:
            found[number] = _judge_fault(replica, [twin[number] for twin in theirs], own, must_recover)
    order = (Verdict.INCONCLUSIVE, Verdict.FAILED, Verdict.PASSED)
    number = min(found, key=lambda index: order.index(found[index].verdict))
    worst = replace(found[number], target=target_in_words(fault.target, fault.params.get("endpoint"), run.plan.job))
    if worst.verdict is Verdict.PASSED and others and must_recover and not run.stopped:
        why = f"replica {others[0][0]}, which was not hit, ended with exit code {others[0][1]}"
        return replace(worst, verdict=Verdict.FAILED, reason=why)
    return worst if worst.verdict is Verdict.PASSED else replace(worst, reason=f"replica {number}: {worst.reason}")


def _judge_fault(run: Record, twins: Sequence[Record], fault: PlannedFault, must_recover: bool) -> FaultResult:
    hits = list(run.of_fault(fault.id, Kind.APPLYING))
    evidence, unproved = _evidence(run, twins, fault) if hits else (None, "")
    wrong = landed_wrong(run, fault, hits)
    verdict, reason = Verdict.PASSED, "landed where and when it was planned, and was felt"
    if not hits:
        verdict, reason = Verdict.INCONCLUSIVE, f"it never landed: {_why_missed(run, fault)}"
    elif wrong:
        verdict, reason = Verdict.INCONCLUSIVE, wrong
    elif evidence is None:
        verdict, reason = Verdict.INCONCLUSIVE, unproved or "it was applied, but nothing shows that it was felt"
    proved = verdict is Verdict.PASSED
    if proved and must_recover:
        verdict, reason = not_outlived(run, twins, fault) or (verdict, reason)
    return FaultResult(
        id=fault.id,
        inject=fault.inject,
        target=target_in_words(hit_target(run, fault, hits), fault.params.get("endpoint")),
        planned=moment_in_words(fault.trigger),
        applied=_applied_in_words(hits) if hits else None,
        evidence=evidence.what if evidence else None,
        rollback=_rollback_in_words(run, fault.id),
        verdict=verdict,
        reason=reason,
        proved=proved,
        measured=_measured(run, fault),
        imitates=_imitates(fault),
    )


def _imitates(fault: PlannedFault) -> str:
    try:
        return injector_of(fault).imitates
    except Exception:  # a plug-in's code may raise anything, and `_evidence` reports it
        return ""


def _why_missed(run: Record, fault: PlannedFault) -> str:
    missed = next((event.data for event in run.of_fault(fault.id, Kind.MISSED)), None)
    if missed is None:
        return "no trace of it"
    if not missed.get("ended_before", missed["reason"] == ENDED_BEFORE):  # older journals have only the reason
        return str(missed["reason"])
    if ended := ended_before_steps(run):
        return ended
    rank, step = (getattr(fault.trigger, name, None) for name in ("pacer", "step"))
    last = run.history.highest_step()
    if None not in (step, rank, last) and rank not in run.history.executions.ranks:
        return f"no step of rank {rank} was seen; the fault was planned for its step {step}; choose a rank that trains"
    if step is not None and last is not None and step > last:
        ended = f"the run was ended early, after step {last}" if run.stopped else f"the job ended at step {last}"
        return f"{ended}; the fault was planned for step {step}"
    if last is None and (step is not None or getattr(fault.trigger, "phase", None)):
        return why_unseen(run, "steps")
    return str(missed["reason"])


def _measured(run: Record, fault: PlannedFault) -> dict[str, dict[str, float]]:
    """The requested network values, and the last values that were measured while the fault was on."""
    found: dict[str, dict[str, float]] = {}
    try:
        asked_for = injector_of(fault).asked()
    except Exception:  # a plug-in's code may raise anything, and `_evidence` reports it
        return found
    for name, asked in asked_for.items():
        for event in run.of_fault(fault.id, Kind.NETWORK):
            values = {**event.data["counts"], **(event.data.get("measured") or {})}
            if name in values:
                found[name] = {"asked": asked, "measured": values[name]}
    return found


def _evidence(run: Record, twins: Sequence[Record], fault: PlannedFault) -> tuple[Evidence | None, str]:
    """The proof that the fault was felt, or why the proof could not be searched for."""
    try:
        injector = injector_of(fault)
        found = injector.felt(run, fault.id)
        return (injector.felt_by_twin(run, twins, fault.id) if found is None and twins else found), ""
    except ChaosError:
        raise
    except Exception as error:  # it may be code of a plug-in; without its proof, the fault does not count as felt
        return None, f"the injector's own proof failed, {type(error).__name__}: {error}; report it to its author"


def faults_case(faults: Sequence[FaultResult], never_reached: Set[str]) -> Case:
    """The case of all faults. If the job did not recover from a fault and so never reached a later fault, the later
    fault does not make the case inconclusive."""
    bad = [fault_result for fault_result in faults if fault_result.verdict is not Verdict.PASSED]
    if any(result.verdict is Verdict.FAILED for result in bad):
        bad = [result for result in bad if result.id not in never_reached]
    bad.sort(key=lambda result: result.verdict is not Verdict.INCONCLUSIVE)
    if not bad:
        felt = "was felt" if len(faults) == 1 else "were felt"
        told = f"{len(faults)} of {len(faults)} landed as planned, {felt} and outlived{synthetic(faults)}"
        return Case("faults", "faults", Verdict.PASSED, told)
    return Case("faults", "faults", bad[0].verdict, f"{bad[0].id}: {bad[0].reason}")


def synthetic(faults: Sequence[FaultResult]) -> str:
    """A clause that names the faults that only imitate a report, and whose. Empty if all really happened."""
    told = {fault.inject: fault.imitates for fault in faults if fault.imitates}
    return "".join(f"; {name} is synthetic: it imitates {whose}" for name, whose in told.items())


def _applied_in_words(hits: Sequence[Event]) -> str:
    hit = hits[0]
    parts = [
        f"step {hit.data['global_step']}" if hit.data["global_step"] is not None else "",
        str(hit.data["phase"] or "").replace("_", " "),
        ", ".join(f"pid {event.data['pid']}" for event in hits if event.data["pid"] is not None),
        f"attempt {hit.attempt}" if hit.attempt is not None else "",
    ]
    nodes = [str(event.data["node"]) for event in hits if event.data.get("node") is not None]
    return ", ".join(part for part in parts if part) or (f"node {', '.join(nodes)}" if nodes else "once")


def _rollback_in_words(run: Record, fault: str) -> str:
    why = next((e.data.get("why") for e in run.of_kind(Kind.GUARDED) if e.data["record"] == fault), None)
    if why:
        return f"not possible: {why}"
    back = list(run.of_fault(fault, Kind.ROLLED_BACK))
    if not back:
        return "not needed"
    return "verified" if back[-1].data["verified"] else f"INCOMPLETE: {back[-1].data.get('reason', '')}"
