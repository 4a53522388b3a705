"""The result of each fault, and the gates that it must pass before assertions count. The gates ask whether the fault
landed (hit its target) as planned, and whether the job outlived the fault. A third gate, whether the fault was felt, is
in the injector. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace

from torchaos.harness.analysis.ending import (
    LEFT_OPEN,
    ended_from_outside,
    ended_on_purpose_s,
    ends_so_without_fault,
    failed_rank,
    own_exit_code,
)
from torchaos.harness.analysis.hit_targets import has_put_back, hit_target, step_in_words, strayed
from torchaos.harness.analysis.missing_data import ended_before_steps, no_rank_found, why_unplaced, why_unseen
from torchaos.harness.analysis.recovery_times import never_in_words, recoveries, why_moot
from torchaos.harness.analysis.replica_verdict import ranks_alone
from torchaos.harness.interfaces import ChaosError, Evidence, Target
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history.history import is_down
from torchaos.harness.record.plan import ENDED_BEFORE, PlannedFault, moment_in_words, target_in_words
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Case, FaultResult, Verdict
from torchaos.harness.registry import injector_of

NOTHING_RECORDED = "nothing was recorded: the job was never started, or the run's journal is gone"


def landed_wrong(run: Record, fault: PlannedFault, hits: Sequence[Event]) -> str | None:
    """A clause: why the fault hit at a wrong place or time, or too often or too seldom. None if it hit as planned. The
    step is checked against the history, which does not depend on the agent's own count."""
    place = _wrong_place(fault, hit_target(run, fault, hits), hits)
    missed = [
        event for event in run.of_fault(fault.id, Kind.MISSED) if place or not _is_of_a_later_attempt(event, hits)
    ]
    if missed:
        return f"it did not land as often as planned: {missed[0].data['reason']}"
    wrong = strayed(run, fault, hits) or place
    return wrong or next(filter(None, (_wrong_time(run, fault, hit) for hit in hits)), None)


def _is_of_a_later_attempt(missed: Event, hits: Sequence[Event]) -> bool:
    """Whether the event comes from an attempt after the last landing: a job that a scheduler starts again may get the
    order to fire again."""
    return missed.attempt is not None and all(hit.attempt is not None and hit.attempt < missed.attempt for hit in hits)


def _wrong_place(fault: PlannedFault, target: Target, hits: Sequence[Event]) -> str | None:
    landed = Counter(hit.rank for hit in hits)
    strangers = landed.keys() - {None, *target.ranks}
    if strangers:
        return f"it landed on rank {min(each for each in strangers if each is not None)}, which is not its target"
    without_rank = landed.keys() == {None}
    due = {None: fault.times * max(1, len(target.nodes))} if without_rank else dict.fromkeys(target.ranks, fault.times)
    for rank, times in due.items():
        if landed[rank] != times:
            where = "" if rank is None else f" on rank {rank}"
            return f"it landed {landed[rank]} of {times} times{where}" if landed[rank] else f"it never landed{where}"
    return None


def _wrong_time(run: Record, fault: PlannedFault, hit: Event) -> str | None:
    when = fault.trigger
    if not isinstance(when, Moment):
        return None
    held = [event for event in run.of_fault(fault.id, Kind.HELD) if event.mono_s <= hit.mono_s]
    if fault.where == "node" and not held:
        return "no rank was held at the moment of the fault"
    at = hit if fault.where == "rank" else held[-1]
    attempts = {at.attempt, hit.attempt} - {None}
    if len(attempts) > 1 or (when.attempt is not None and attempts != {when.attempt}):
        due = at.attempt if when.attempt is None else when.attempt
        return f"it was planned for attempt {due}, and landed in attempt {hit.attempt}"
    if when.phase is not None and at.data["phase"] != when.phase.value:
        return f"it was planned for phase {when.phase.value}, and landed in {at.data['phase']}"
    # The time of the fault counts, not the time of the hold, because the rank may have gone on by itself meanwhile.
    done = run.history.steps_done(at.rank, at.attempt, hit.mono_s) if when.step is not None else None
    if (
        when.step is not None
        and (done is None or done + 1 != when.step)
        and not (at.data.get("global_step") == when.step and has_put_back(run.history, at))
    ):
        where = "an unknown step" if done is None else f"step {done + 1}"
        return f"it was planned for step {when.step}, and landed in {where}"
    return None


def never_reached(run: Record, fault: PlannedFault) -> bool:
    """Whether the run ended before the planned point of the fault."""
    if any(run.of_fault(fault.id, Kind.APPLYING, Kind.HELD)):
        return False
    when = fault.trigger
    if isinstance(when, Moment):
        return when.step is not None and when.step > (run.history.highest_step() or 0) + 1
    missed = list(run.of_fault(fault.id, Kind.MISSED))  # older journals have only the reason, not the field
    return bool(missed) and all(e.data.get("ended_before", e.data["reason"] == ENDED_BEFORE) for e in missed)


def never_started(run: Record) -> str | None:
    """Why nothing can be judged: the run was ended before its job was started, or before anything was recorded, or was
    interrupted before its first step."""
    if not run.stopped:
        return None if run.events else NOTHING_RECORDED
    if not run.plan.job.attached and not any(run.of_kind(Kind.JOB_STARTED)):
        return "the job was never started, so there is nothing to judge"
    ended = ended_before_steps(run) if run.stopped.data.get("interrupted", True) else ""
    return f"{ended}, so there is nothing to judge" if ended else None


def ranks_repeat(run: Record) -> str | None:
    """Why the history can't be trusted: two programs made steps as the same rank of the same attempt. A program that
    replaces itself (exec) writes to a file of the same name with an x added (agent/startup.py)."""
    sources = run.sources_of_steps
    twice = next((key for key, found in sorted(sources.items()) if len(found) > 1), None)
    if twice is None:
        return None
    attempt, rank = twice
    if len({source.rstrip("x") for source in sources[twice]}) == 1:
        return (
            f"rank {rank} of attempt {attempt} replaced its own program (exec) and then made more steps: the steps "
            "before and after that can't be told apart"
        )
    return (
        f"rank {rank} of attempt {attempt} was {len(sources[twice])} processes, which all made steps, as in a job of "
        "several torchruns: it is not known which process made which step"
    )


def not_outlived(run: Record, twins: Sequence[Record], fault: PlannedFault) -> tuple[Verdict, str] | None:
    """The verdict on a fault that the job has not outlived, and why. None if it was outlived. If the ranks have no
    common step, each must have outlived it."""
    alone = ranks_alone(run, twins)
    if not alone:
        return _not_outlived(run, twins, fault)
    found = {rank: why for rank, parts in alone.items() if (why := _not_outlived(*parts, fault))}
    for rank, (verdict, reason) in sorted(found.items(), key=lambda item: item[1][0] is not Verdict.FAILED):
        return verdict, f"rank {rank}: {reason}"
    return None


def _not_outlived(run: Record, twins: Sequence[Record], fault: PlannedFault) -> tuple[Verdict, str] | None:
    """The verdict on a fault that the job has not outlived, and why. None if it was outlived. A job has not recovered
    if it never got past its highest step before the fault, or if it later ends with an error: failed. If the run was
    ended on purpose while the job was down again for another reason than a fault: inconclusive."""
    if not run.history.executions:
        return Verdict.INCONCLUSIVE, "no step could be seen, so nothing shows that the job went on"
    behind = {recovery.fault for recovery in recoveries(run, twins) if recovery.parts["caught_up"] is None}
    if fault.id not in behind:
        return _ended_badly(run, bool(behind))
    if run.history.unplaced:
        return Verdict.INCONCLUSIVE, why_unplaced(run, run.history.unplaced)
    if run.ended_on_purpose:
        return Verdict.INCONCLUSIVE, "the run was ended on purpose before the job had recovered; see its `until`"
    if why := why_moot(run, fault.id, twins):
        return Verdict.INCONCLUSIVE, why
    if ended_from_outside(run):
        return Verdict.INCONCLUSIVE, LEFT_OPEN
    return Verdict.FAILED, f"the job {never_in_words(run, fault.id, twins)}"


def _ended_badly(run: Record, behind: bool) -> tuple[Verdict, str] | None:
    """The verdict on a job that got past the fault and did not end well. `behind`: it did not get past another
    fault."""
    code, reached = own_exit_code(run), run.history.highest_step() or 0
    past = "the job got past the fault, and"
    if code not in (None, 0):
        how = f"{past} then ended with exit code {code} in step {reached}"
        if ends_so_without_fault(run):
            return Verdict.INCONCLUSIVE, f"{how}, as it does without a fault"
        return Verdict.FAILED, how
    if broken := failed_rank(run):
        how = f"rank {broken.rank} ended with exit code {broken.exit_code} in step {reached}"
        return Verdict.FAILED, f"{past} then {how}, though the command's own exit code is {code}"
    if not behind and (stopped_s := ended_on_purpose_s(run)) and is_down(run.history, run.beside_steps, stopped_s):
        return Verdict.INCONCLUSIVE, f"{past} was down again when the run was ended"
    return None


def fault_result(run: Record, twins: Sequence[Record], fault: PlannedFault, must_recover: bool) -> FaultResult:
    """The result of a fault. In a job of replicas: the worst result of the replicas that the fault was planned to hit;
    the other replicas must end successfully."""
    if run.plan.job.replicas == 1:
        return _judge_fault(run, twins, fault, must_recover)
    theirs, found, others = [twin.of_replicas for twin in twins], {}, []
    for number, replica in enumerate(run.of_replicas):
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
        applied=_applied_in_words(run, hits) if hits else None,
        evidence=evidence.what if evidence else None,
        rollback=_rollback_in_words(run, fault.id),
        verdict=verdict,
        reason=reason,
        proved=proved,
        measured=_measured(run, fault),
        **_not_real(fault),
    )


def _not_real(fault: PlannedFault) -> dict[str, str]:
    """Whose report the fault imitates, and which record it replays. Both empty if the fault really happens."""
    try:
        injector = injector_of(fault)
        return {"imitates": "" if injector.replays else injector.imitates, "replays": injector.replays}
    except Exception:  # a plug-in's code may raise anything, and `_evidence` reports it
        return {}


def _why_missed(run: Record, fault: PlannedFault) -> str:
    missed = next((event.data for event in run.of_fault(fault.id, Kind.MISSED)), None)
    if missed is None:
        return "no trace of it"
    if not missed.get("ended_before", missed["reason"] == ENDED_BEFORE):  # older journals have only the reason
        return str(missed["reason"])
    if ended := ended_before_steps(run):
        return ended
    if unfound := no_rank_found(run):
        return unfound
    rank, step = (getattr(fault.trigger, name, None) for name in ("pacer", "step"))
    last = run.history.highest_step()
    if run.history.source == "log" and step is not None:
        return (
            f"only the job's log shows steps, and the agent none; the fault was planned for step {step}; write a time"
        )
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
    except Exception as error:  # this may be code of a plug-in; without its proof, the fault does not count as felt
        return None, f"the injector's own proof failed, {type(error).__name__}: {error}; report it to its author"


def faults_case(faults: Sequence[FaultResult], never_reached: Set[str]) -> Case:
    """The case of all faults. A later fault that was never reached because the job did not recover from an earlier one
    does not make the case inconclusive."""
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
    """A clause that names the faults that only imitate somebody's report or replay a record. Empty if all faults really
    happened."""
    told = {fault.inject: f"synthetic: it imitates {fault.imitates}" for fault in faults if fault.imitates}
    told |= {fault.inject: f"replayed: it says again what {fault.replays} said" for fault in faults if fault.replays}
    return "".join(f"; {name} is {how}" for name, how in told.items())


def _applied_in_words(run: Record, hits: Sequence[Event]) -> str:
    hit = hits[0]
    parts = [
        step_in_words(run, hit),
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
