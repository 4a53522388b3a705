"""From a record to a Result. Gates come first: a fault that did not land, or was not felt, proves nothing.

Pure but for `judge`, which loads the record from a run directory: the same verdicts again, offline.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from torchaos.harness import registry
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.contracts import Assertion, ChaosError, Evidence, Finding, Need, Outcome, UsageError, inconclusive
from torchaos.harness.engine.faults import injector_of
from torchaos.harness.judging.gates import landed_wrong, never_reached, not_outlived, ranks_repeat
from torchaos.harness.judging.known import because, causes_in_words
from torchaos.harness.judging.recovery import recoveries
from torchaos.harness.judging.replicas import judged
from torchaos.harness.judging.split import split_brain
from torchaos.harness.plan import Named, Plan, PlannedFault
from torchaos.harness.record import Record
from torchaos.harness.replicas import records_of as replicas_of
from torchaos.harness.result import Case, ExitCode, FaultResult, Result, Verdict
from torchaos.harness.rundir import RunDir
from torchaos.harness.words import moment_in_words, target_in_words

SPLIT_BRAIN = "split_brain"  # said of the run whatever was asserted, when there was one
_OF_OUTCOME = {
    Outcome.PASSED: Verdict.PASSED,
    Outcome.FAILED: Verdict.FAILED,
    Outcome.INCONCLUSIVE: Verdict.INCONCLUSIVE,
}
_EXIT = {Verdict.PASSED: ExitCode.PASSED, Verdict.FAILED: ExitCode.FAILED, Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE}


def judge(folder: RunDir) -> Result:
    """Judge what lies in a run directory. Raises ChaosError where it is not whole."""
    run, twins = records_of(folder)
    return verdict_of(run, twins, str(folder.root))


def records_of(folder: RunDir) -> tuple[Record, list[Record]]:
    """The records of a run and of its twins. Raises ChaosError where one is not whole."""
    twins = sorted(folder.twins.iterdir()) if folder.twins.is_dir() else []
    return Record.load(folder), [Record.load(RunDir(path)) for path in twins]


def verdict_of(run: Record, twins: Sequence[Record], run_dir: str) -> Result:
    parts = replicas_of(run)
    assertions = [_assertion(named) for named in run.plan.asserts]
    must_recover = all(getattr(assertion, "expects_recovery", True) for assertion in assertions)
    faults = tuple(_of_replicas(run, twins, fault, must_recover) for fault in run.plan.faults)
    cases = [
        _case(named, _finding(assertion, run, twins))
        for named, assertion in zip(run.plan.asserts, assertions, strict=True)
    ]
    if faults:
        late = {fault.id for one in parts for fault in one.plan.faults if never_reached(one, fault)}
        cases.insert(0, _faults_case(faults, late))
    if split := next(filter(None, map(split_brain, parts)), None):
        cases.insert(0, Case(SPLIT_BRAIN, "assertion", Verdict.FAILED, split))
    rollback = _rollback_case(run)
    verdict, reason = _overall(run, twins, cases)
    if verdict is not Verdict.PASSED:
        reason += because(run)
    elif rollback.verdict is not Verdict.PASSED:
        verdict, reason = Verdict.ERROR, f"rollback: {rollback.reason}"
    first, last = (run.events[0], run.events[-1]) if run.events else (None, None)
    return Result(
        scenario=run.plan.scenario,
        description=run.plan.description,
        seed=run.plan.seed,
        verdict=verdict,
        exit_code=_EXIT[verdict] if rollback.verdict is Verdict.PASSED else ExitCode.ROLLBACK,
        reason=reason,
        run_dir=run_dir,
        started=_clock_time(first.wall_s if first else 0.0),
        duration_s=round(last.mono_s - first.mono_s, 3) if first and last else 0.0,
        faults=faults,
        recoveries=tuple(recovery for one in parts for recovery in recoveries(one)),
        cases=(*cases, rollback),
        steps=max((one.history.last_step for one in parts if one.history.last_step is not None), default=None),
        attempts=max(len(one.history.attempts) for one in parts),
        twin=_about_twins(run.plan, twins),
        reproduce=shlex.join(map(str, _environment(run).get("reproduce") or ())),
        versions={k: str(_environment(run).get(k, "")) for k in ("torchaos", "torch", "python")},
        notes=tuple(_notes(run)),
    )


def _assertion(named: Named) -> Assertion:
    try:
        found: Assertion = registry.find("assertions", named.name)(**named.params)
    except TypeError as error:
        raise UsageError(f"the plan is damaged: {named.name} can't be made from its bounds: {error}") from error
    return found


def _finding(assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    try:
        finding = judged(assertion, run, twins)
    except ChaosError as error:
        return inconclusive(str(error))
    except Exception as error:  # it may be anybody's code, and the others still have something to say
        return inconclusive(f"the assertion itself failed, {type(error).__name__}: {error}; report it to its author")
    if finding.outcome is Outcome.PASSED and run.plan.twin and not twins and Need.TWIN in assertion.needs:
        reason = f"the twin that was to be the measure could not be had; without it, {finding.reason}"
        return replace(finding, outcome=Outcome.INCONCLUSIVE, reason=reason)
    return finding


def _case(named: Named, finding: Finding) -> Case:
    outcome, seconds = _OF_OUTCOME[finding.outcome], registry.seconds_of(registry.find("assertions", named.name))
    return Case(
        named.name, "assertion", outcome, finding.reason, finding.measured, finding.bound, tuple(sorted(seconds))
    )  # fmt: skip


def _of_replicas(run: Record, twins: Sequence[Record], fault: PlannedFault, must_recover: bool) -> FaultResult:
    """In a job of replicas: in those that it was to hit, the worst; and the others have to end well all the same."""
    if run.plan.job.replicas == 1:
        return _judge_fault(run, twins, fault, must_recover)
    theirs, found, others = [replicas_of(twin) for twin in twins], {}, []
    for number, one in enumerate(replicas_of(run)):
        own = next((own for own in one.plan.faults if own.id == fault.id), None)
        if own is None:
            others += [(number, e.data["exit_code"]) for e in one.of_kind(Kind.JOB_EXITED) if e.data["exit_code"]]
        else:
            found[number] = _judge_fault(one, [twin[number] for twin in theirs], own, must_recover)
    order = (Verdict.INCONCLUSIVE, Verdict.FAILED, Verdict.PASSED)
    number = min(found, key=lambda one: order.index(found[one].verdict))
    told = replace(found[number], target=target_in_words(fault.target, fault.params.get("endpoint"), run.plan.job))
    if told.verdict is Verdict.PASSED and others and must_recover and not _was_stopped(run):
        why = f"replica {others[0][0]}, which was not hit, ended with exit code {others[0][1]}"
        return replace(told, verdict=Verdict.FAILED, reason=why)
    return told if told.verdict is Verdict.PASSED else replace(told, reason=f"replica {number}: {told.reason}")


def _was_stopped(run: Record) -> bool:
    return any(run.of_kind(Kind.STOPPED))


def _judge_fault(run: Record, twins: Sequence[Record], fault: PlannedFault, must_recover: bool) -> FaultResult:
    hits = list(run.of_fault(fault.id, Kind.APPLYING))
    evidence, unproved = _evidence(run, twins, fault) if hits else (None, "")
    wrong = landed_wrong(run, fault, hits)
    verdict, reason = Verdict.PASSED, "landed where and when it was planned, and was felt"
    if not hits:
        missed = [str(event.data["reason"]) for event in run.of_fault(fault.id, Kind.MISSED)]
        verdict, reason = Verdict.INCONCLUSIVE, f"it never landed: {missed[0] if missed else 'no trace of it'}"
    elif wrong:
        verdict, reason = Verdict.INCONCLUSIVE, wrong
    elif evidence is None:
        verdict, reason = Verdict.INCONCLUSIVE, unproved or "it was applied, but nothing shows that it was felt"
    elif must_recover:
        verdict, reason = not_outlived(run, twins, fault) or (verdict, reason)
    return FaultResult(
        id=fault.id,
        inject=fault.inject,
        target=target_in_words(fault.target, fault.params.get("endpoint")),
        planned=moment_in_words(fault.trigger),
        applied=_applied_in_words(hits) if hits else None,
        evidence=evidence.what if evidence else None,
        rollback=_rollback_in_words(run, fault.id),
        verdict=verdict,
        reason=reason,
        measured=_measured(run, fault),
    )


def _measured(run: Record, fault: PlannedFault) -> dict[str, dict[str, float]]:
    """What was asked of the network beside the last that was measured while the fault was on."""
    found: dict[str, dict[str, float]] = {}
    try:
        asked_for: dict[str, float] = getattr(injector_of(fault), "asked", dict)()
    except Exception:  # it may be anybody's code, or parameters that it does not know; `_evidence` says so
        return found
    for name, asked in asked_for.items():
        for event in run.of_fault(fault.id, Kind.NETWORK):
            said = {**event.data["counts"], **(event.data.get("measured") or {})}
            if name in said:
                found[name] = {"asked": asked, "measured": said[name]}
    return found


def _evidence(run: Record, twins: Sequence[Record], fault: PlannedFault) -> tuple[Evidence | None, str]:
    """The proof that it was felt, or why it could not be looked for."""
    try:
        injector = injector_of(fault)
        found = injector.felt(run, fault.id)
        by_twin = getattr(injector, "felt_by_twin", None)  # of what no witness within the run can tell
        return (by_twin(run, twins, fault.id) if found is None and twins and by_twin else found), ""
    except ChaosError:
        raise
    except Exception as error:  # it may be anybody's code; without its proof nothing is claimed
        return None, f"the injector's own proof failed, {type(error).__name__}: {error}; report it to its author"


def _faults_case(faults: Sequence[FaultResult], never_reached: Set[str]) -> Case:
    """What never came because the job had not outlived an earlier fault does not make that doubtful."""
    bad = [one for one in faults if one.verdict is not Verdict.PASSED]
    if any(one.verdict is Verdict.FAILED for one in bad):
        bad = [one for one in bad if one.id not in never_reached]
    bad.sort(key=lambda one: one.verdict is not Verdict.INCONCLUSIVE)
    if not bad:
        return Case(
            "faults",
            "faults",
            Verdict.PASSED,
            f"{len(faults)} of {len(faults)} landed as planned, were felt and outlived",
        )
    return Case("faults", "faults", bad[0].verdict, f"{bad[0].id}: {bad[0].reason}")


def _rollback_case(run: Record) -> Case:
    undone = list(run.of_kind(Kind.ROLLED_BACK, Kind.HEALED))
    bad = [event for event in undone if not event.data["verified"]]
    if bad:
        why = bad[0].data.get("reason", "")
        return Case("rollback", "rollback", Verdict.ERROR, f"{_owner(bad[0])} could not be taken back: {why}")
    back = {_owner(event): event.mono_s for event in undone}  # the last time
    guarded = [event for event in run.of_kind(Kind.GUARDED) if event.data["handles"]]
    unhealed = {_owner(event) for event in guarded if back.get(_owner(event), -math.inf) < event.mono_s}
    if unhealed:
        return Case("rollback", "rollback", Verdict.ERROR, f"nothing shows that {min(unhealed)} was taken back")
    return Case("rollback", "rollback", Verdict.PASSED, "all that was changed has been taken back, and verified")


def _owner(event: Event) -> str:
    return str(event.data.get("fault") or event.data.get("record"))


def _overall(run: Record, twins: Sequence[Record], cases: Sequence[Case]) -> tuple[Verdict, str]:
    """A fault that did not land or was not felt makes everything inconclusive, and so does a journal with lines that
    can't be read, since nobody knows what they said; then failed beats inconclusive."""
    stopped = next((event.data for event in run.of_kind(Kind.STOPPED)), None)
    by_verdict = {verdict: [case for case in cases if case.verdict is verdict] for verdict in Verdict}
    gate = [case for case in by_verdict[Verdict.INCONCLUSIVE] if case.kind == "faults"]
    early = stopped and not stopped.get("enough", False)
    if stopped and early and (stopped.get("interrupted", True) or not by_verdict[Verdict.FAILED]):
        return Verdict.INCONCLUSIVE, f"the run was ended early: {stopped['reason']}"
    for whose, damaged in (("the journal", run.damaged), *(("the journal of a twin", one.damaged) for one in twins)):
        if damaged:
            many = f"{len(damaged)} of its lines can't be read, such as {damaged[0]}"
            return Verdict.INCONCLUSIVE, f"{whose} is damaged: {many}"
    split = [case for case in by_verdict[Verdict.FAILED] if case.name == SPLIT_BRAIN]
    if not split and (twice := next(filter(None, map(ranks_repeat, (run, *twins))), None)):
        return Verdict.INCONCLUSIVE, twice
    for found in (split, gate, by_verdict[Verdict.FAILED], by_verdict[Verdict.INCONCLUSIVE]):
        if found:
            return found[0].verdict, f"{found[0].name}: {found[0].reason}"
    stages = [str(event.data["stage"]) for event in run.of_kind(Kind.STAGE)]
    if stages and stages[-1] != "end":
        return Verdict.INCONCLUSIVE, f"the run was never finished: its last stage is {stages[-1]}"
    if not cases:
        return Verdict.INCONCLUSIVE, "nothing was asserted and nothing was injected"
    return (
        Verdict.PASSED,
        "every fault was felt and outlived, and every assertion holds" if run.plan.faults else "every assertion holds",
    )


def _applied_in_words(hits: Sequence[Event]) -> str:
    hit = hits[0]
    parts = [
        f"step {hit.data['global_step']}" if hit.data["global_step"] is not None else "",
        str(hit.data["phase"] or "").replace("_", " "),
        ", ".join(f"pid {one.data['pid']}" for one in hits if one.data["pid"] is not None),
        f"attempt {hit.attempt}" if hit.attempt is not None else "",
    ]
    nodes = [str(one.data["node"]) for one in hits if one.data.get("node") is not None]
    return ", ".join(part for part in parts if part) or (f"node {', '.join(nodes)}" if nodes else "once")


def _rollback_in_words(run: Record, fault: str) -> str:
    why = next((e.data.get("why") for e in run.of_kind(Kind.GUARDED) if e.data["record"] == fault), None)
    if why:
        return f"not possible: {why}"
    back = list(run.of_fault(fault, Kind.ROLLED_BACK))
    if not back:
        return "not needed"
    return "verified" if back[-1].data["verified"] else f"INCOMPLETE: {back[-1].data.get('reason', '')}"


def _clock_time(wall_s: float) -> str:
    """In ISO 8601; the epoch for what is no time that a calendar has, as in a damaged journal."""
    try:
        moment = datetime.fromtimestamp(wall_s, timezone.utc)
    except (ValueError, OverflowError, OSError):
        moment = datetime.fromtimestamp(0.0, timezone.utc)
    return moment.isoformat(timespec="seconds")


def _about_twins(plan: Plan, twins: Sequence[Record]) -> str:
    if twins:
        return f"{len(twins)} fault-free {'twin' if len(twins) == 1 else 'twins'}"
    return "no twin was wanted" if not plan.twin else "no twin could be had"


def _environment(run: Record) -> Mapping[str, Any]:
    """The artifact; empty where it is missing or is no longer one."""
    found = run.artifacts.get("environment")
    return {} if not isinstance(found, dict) or not isinstance(found.get("reproduce", []), list) else found


def _notes(run: Record) -> list[str]:
    notes = [str(event.data["text"]) for event in run.of_kind(Kind.NOTE)]
    notes += [f"the agent's hook {e.data['hook']} failed: {e.data['error']}" for e in run.of_kind(Kind.AGENT_FAILED)]
    return list(dict.fromkeys([*notes, *causes_in_words(run)]))
