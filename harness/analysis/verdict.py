"""Makes a Result from a record, by `verdict_of`. First come the gates that every fault must pass: a fault that missed
its target, or had no effect that was seen, proves nothing, and no assertion can change that. Then come the assertions.

`judge` loads the record from a run directory, and gives the same verdict again, offline. Everything else is pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from torchaos.harness import registry
from torchaos.harness.analysis.checkpointing.saved_parameters import ranks_apart
from torchaos.harness.analysis.comparison.agreement import history_of
from torchaos.harness.analysis.comparison.end_states import against_the_end
from torchaos.harness.analysis.ending import (
    LEFT_OPEN,
    died_by_itself,
    ended_from_outside,
    last_error,
    last_words,
    never_ends_in_time,
    not_resumed,
    twins_end_apart,
)
from torchaos.harness.analysis.explanations import advice, because, came_at, causes_in_words, linked, split_brain
from torchaos.harness.analysis.fault_results import (
    NOTHING_RECORDED,
    fault_result,
    faults_case,
    never_reached,
    never_started,
    ranks_repeat,
    synthetic,
)
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.missing_data import missing_in_words
from torchaos.harness.analysis.recovery_times import recovery_from
from torchaos.harness.analysis.replica_verdict import judged, ranks_alone
from torchaos.harness.base_classes import Assertion
from torchaos.harness.host.processes import uncollected
from torchaos.harness.interfaces import ChaosError, Finding, First, Harm, Need, Outcome, UsageError, What, inconclusive
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import Named, Plan
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Case, ExitCode, FaultResult, Recovery, Result, Verdict
from torchaos.harness.record.rundir import RunDir

_OF_PARAMETERS = (What.LOSS, What.PARAMETERS, What.REPLICAS, What.SAVED, What.LOADED)  # consequences of the parameters
_OF_THE_END = (What.ENDING, What.LAST, What.ABSENT, What.UNHIT)
SPLIT_BRAIN = "split_brain"  # a case that is added if there was a split brain, for every set of assertions


def harm_of(name: str) -> Harm:
    """The consequence for the job if this assertion, or the case of a split brain, fails."""
    if name == SPLIT_BRAIN:
        return Harm.WRONG_RESULT
    declared = registry.find("assertions", name).harm
    return Harm(declared) if declared in list(Harm) else Harm.OTHER


def judge(folder: RunDir) -> Result:
    """Judges a run directory. Raises ChaosError if it is incomplete."""
    run, twins = records_of(folder)
    return verdict_of(run, twins, str(folder.root))


def records_of(folder: RunDir) -> tuple[Record, list[Record]]:
    """The records of a run and of its twins. Raises ChaosError if one is incomplete."""
    paths = sorted(folder.twins.iterdir()) if folder.twins.is_dir() else []
    twins = [Record.load(RunDir(path)) for path in paths]
    return Record.load(folder).beside(twins), twins


@uncollected()
def verdict_of(run: Record, twins: Sequence[Record], run_dir: str) -> Result:
    run = run.beside(twins)
    parts = run.of_replicas
    of_twins = [list(own) for own in zip(*(twin.of_replicas for twin in twins), strict=True)] or [[] for _ in parts]
    assertions = [_assertion(named) for named in run.plan.asserts]
    must_recover = all(assertion.expects_recovery for assertion in assertions)
    faults = tuple(fault_result(run, twins, fault, must_recover) for fault in run.plan.faults)
    mixed = next(filter(None, map(ranks_repeat, (run, *twins))), None)
    blind = never_started(run) or mixed
    findings = [inconclusive(blind) if blind else _finding(assertion, run, twins) for assertion in assertions]
    cases = [_case(named, finding, run, twins) for named, finding in zip(run.plan.asserts, findings, strict=True)]
    late = {fault.id for replica in parts for fault in replica.plan.faults if never_reached(replica, fault)}
    landed = [faults_case(faults, late)] if faults else []
    cases = [*landed, *linked(cases, findings, landed)]
    if split := next(filter(None, map(split_brain, parts)), None):
        cases.insert(0, Case(SPLIT_BRAIN, "assertion", Verdict.FAILED, split))
    rollback = _rollback_case(run)
    firsts = {named.name: found.first for named, found in zip(run.plan.asserts, findings, strict=True)}
    verdict, reason, decided_by = _overall(run, twins, cases, mixed, faults, firsts)
    if verdict is not Verdict.PASSED:
        died, unloaded = died_by_itself(run), not_resumed(run) if verdict is Verdict.FAILED else ""
        if why := died or (reason if run.stopped and never_started(run) else unloaded):
            shown = decided_by or next((case.name for case in cases), "")
            cases = [replace(case, reason=f"{why}; {case.reason}") if case.name == shown else case for case in cases]
        if unloaded and not died:
            reason = reason.replace(f"{decided_by}: ", f"{decided_by}: {unloaded}; ", 1)
        reason = (died or reason + last_error(run)) + because(run)
    elif rollback.verdict is not Verdict.PASSED:
        verdict, reason, decided_by = Verdict.ERROR, f"rollback: {rollback.reason}", rollback.name
    first, last = (run.events[0], run.events[-1]) if run.events else (None, None)
    return Result(
        scenario=run.plan.scenario,
        description=run.plan.description,
        seed=run.plan.seed,
        verdict=verdict,
        exit_code=verdict.exit_code if rollback.verdict is Verdict.PASSED else ExitCode.ROLLBACK,
        reason=reason,
        run_dir=run_dir,
        started=_clock_time(first.wall_s if first else 0.0),
        duration_s=round(last.mono_s - first.mono_s, 3) if first and last else 0.0,
        faults=faults,
        recoveries=tuple(found for part, own in zip(parts, of_twins, strict=True) for found in _recoveries(part, own)),
        cases=(*cases, rollback),
        steps=max(
            (replica.history.last_step for replica in parts if replica.history.last_step is not None), default=None
        ),
        attempts=max(len(replica.history.attempts) for replica in parts),
        twin=_about_twins(run.plan, twins),
        reproduce=shlex.join(map(str, _environment(run).get("reproduce") or ())),
        versions={k: str(_environment(run).get(k, "")) for k in ("torchaos", "torch", "python")},
        notes=tuple(_notes(run, twins)),
        decided_by=decided_by,
        last_words=last_words(run),
    )


def _recoveries(run: Record, twins: Sequence[Record]) -> Iterator[Recovery]:
    """The recovery from each landing, with advice."""
    for landing in landings(run):
        found = recovery_from(run, landing, twins)
        if alone := ranks_alone(run, twins):  # the job has caught up when its last rank has
            each = [recovery_from(part, landing, of_twins) for part, of_twins in alone.values()]
            last = max(each, key=lambda one: math.inf if (at := one.parts["caught_up"]) is None else at)
            parts = {**found.parts, "caught_up": last.parts["caught_up"]}
            found = replace(found, parts=parts, lost_steps=last.lost_steps)
        never = found.parts["caught_up"] is None
        cut_off, unplaced = never and ended_from_outside(run), never and bool(run.history.unplaced)
        yield replace(found, advice=advice(run, landing, found), cut_off=cut_off, unplaced=unplaced)


def _assertion(named: Named) -> Assertion:
    try:
        found: Assertion = registry.find("assertions", named.name)(**named.params)
    except TypeError as error:
        raise UsageError(f"the plan is damaged: {named.name} can't be made from its bounds: {error}") from error
    return found


def _finding(assertion: Assertion, run: Record, twins: Sequence[Record]) -> Finding:
    try:
        finding = against_the_end(judged(assertion, run, twins), run, twins)
    except ChaosError as error:
        return inconclusive(str(error))
    except Exception as error:  # a plug-in's code may raise anything, and the other assertions still count
        return inconclusive(f"the assertion itself failed, {type(error).__name__}: {error}; report it to its author")
    if finding.outcome is Outcome.PASSED and run.plan.twin and not twins and Need.TWIN in assertion.needs:
        reason = f"the twin could not be made; without it, {finding.reason}"
        return replace(finding, outcome=Outcome.INCONCLUSIVE, reason=reason)
    if finding.first and finding.first.what is What.LAST and (apart := twins_end_apart(run, twins)):
        return replace(finding, outcome=Outcome.INCONCLUSIVE, reason=f"{finding.reason}. But {apart}", first=None)
    return inconclusive(LEFT_OPEN) if _is_left_open(finding, run) else finding


def _is_left_open(finding: Finding, run: Record) -> bool:
    """Whether a failure may be due only to the early end of the run: nothing shows that anything was wrong before."""
    if finding.outcome is not Outcome.FAILED or not (run.stopped and ended_from_outside(run)):
        return False
    if finding.at_s is not None and finding.at_s < run.stopped.mono_s:
        return False
    return finding.first is None or finding.first.what in _OF_THE_END


def _case(named: Named, finding: Finding, run: Record, twins: Sequence[Record]) -> Case:
    outcome, seconds = Verdict(finding.outcome.value), registry.seconds_of(registry.find("assertions", named.name))
    wrong_s = _wrong_s(finding, run, twins)
    return Case(
        named.name, "assertion", outcome, finding.reason, finding.measured, finding.bound, tuple(sorted(seconds)),
        cause=finding.cause, at_s=None if wrong_s is None else round(wrong_s - run.events[0].mono_s, 6),
    )  # fmt: skip


def _wrong_s(finding: Finding, run: Record, twins: Sequence[Record]) -> float | None:
    """When the job went wrong, according to a failed assertion, by CLOCK_MONOTONIC. None if it is not known. If the
    parameters of the ranks had drifted apart before the values of the assertion went wrong, that time counts."""
    if finding.outcome is not Outcome.FAILED or run.plan.job.replicas > 1 or finding.first is None:
        return finding.at_s
    done = history_of(run, twins).by_step().get(finding.first.step, {})
    seen_s = max((one.mono_s for one in done.values()), default=None) if finding.at_s is None else finding.at_s
    if finding.first.what not in _OF_PARAMETERS or seen_s is None:
        return finding.at_s if finding.first.what in (What.ENDING, What.LAST, What.ABSENT) else seen_s
    apart = ranks_apart(run)
    return min(seen_s, apart.at_s) if apart else seen_s


def _rollback_case(run: Record) -> Case:
    undone = list(run.of_kind(Kind.ROLLED_BACK, Kind.HEALED))
    bad = [event for event in undone if not event.data["verified"]]
    if bad:
        why = bad[0].data.get("reason", "")
        return Case("rollback", "rollback", Verdict.ERROR, f"{_owner(bad[0])} could not be undone: {why}")
    back = {_owner(event): event.mono_s for event in undone}  # the last time
    guarded = [event for event in run.of_kind(Kind.GUARDED) if event.data["handles"]]
    unhealed = {_owner(event) for event in guarded if back.get(_owner(event), -math.inf) < event.mono_s}
    if unhealed:
        return Case("rollback", "rollback", Verdict.ERROR, f"nothing shows that {min(unhealed)} was undone")
    told = "every change was undone, and every undo was verified" if undone else "there was nothing to undo"
    return Case("rollback", "rollback", Verdict.PASSED, told)


def _owner(event: Event) -> str:
    return str(event.data.get("fault") or event.data.get("record"))


def _overall(
    run: Record, twins: Sequence[Record], cases: Sequence[Case], mixed: str | None, faults: Sequence[FaultResult],
    firsts: Mapping[str, First | None],
) -> tuple[Verdict, str, str]:  # fmt: skip
    """Verdict, reason, and the case that decided. `mixed`: why it is not known which step belongs to which rank; None
    if this is known. `firsts`: by assertion, what was wrong first.

    The first of these decides: the run was ended early; the journal has missing or unreadable lines, so its contents
    are not known; a split brain; `mixed`; a fault that did not land or was not felt; a failed case; an inconclusive
    case. Of failed cases that follow from no other, the one that went wrong first decides."""
    by_verdict = {verdict: [case for case in cases if case.verdict is verdict] for verdict in Verdict}
    wrong, open_ = by_verdict[Verdict.FAILED], by_verdict[Verdict.INCONCLUSIVE]
    split = [case for case in wrong if case.name == SPLIT_BRAIN]
    if why := _not_judged(run, twins, bool(wrong)) or ("" if split else mixed):
        return Verdict.INCONCLUSIVE, why, ""
    proved = all(fault.proved for fault in faults)
    gate = [case for case in open_ if case.kind == "faults" and not proved]
    for found in (split, gate, wrong, open_):
        if roots := [case for case in found if case.follows is None]:
            root = _leading(roots, firsts)
            return root.verdict, f"{root.name}: {root.reason}", root.name
    stages = [str(event.data["stage"]) for event in run.of_kind(Kind.STAGE)]
    if stages and stages[-1] != "end":
        return Verdict.INCONCLUSIVE, f"the run was never finished: its last stage is {stages[-1]}", ""
    if not cases:
        return Verdict.INCONCLUSIVE, "nothing was asserted and nothing was injected", ""
    outlived = "every fault was felt and outlived, and " if run.plan.faults else ""
    return Verdict.PASSED, f"{outlived}every assertion holds{synthetic(faults)}", ""


def _not_judged(run: Record, twins: Sequence[Record], is_wrong: bool) -> str:
    """Why the record decides nothing: it ends early, is damaged or has gaps. Otherwise empty. `is_wrong`: a case
    failed, which stays so if a stop condition of the scenario ended the run."""
    stopped = run.stopped.data if run.stopped else None
    if stopped and not stopped.get("enough", False) and (stopped.get("interrupted", True) or not is_wrong):
        return f"the run was ended early: {never_ends_in_time(run) or stopped['reason']}"
    for journal, record in (("the journal", run), *(("the journal of a twin", twin) for twin in twins)):
        if record.damaged:
            many = f"{len(record.damaged)} of its lines can't be read, such as {record.damaged[0]}"
            return f"{journal} is damaged: {many}"
    return missing_in_words(run, twins) or ("" if run.events else NOTHING_RECORDED)


def _leading(roots: Sequence[Case], firsts: Mapping[str, First | None]) -> Case:
    """Of these cases, the one that went wrong first; the first in the list if no time is known."""
    timed = {case.name: at for case in roots if (at := came_at(firsts.get(case.name)))}
    if roots[0].name not in timed:
        return roots[0]
    return min(roots, key=lambda case: timed.get(case.name, (math.inf, 0)))


def _clock_time(wall_s: float) -> str:
    """The time in ISO 8601. The epoch if it is no possible time, as in a damaged journal."""
    try:
        moment = datetime.fromtimestamp(wall_s, timezone.utc)
    except (ValueError, OverflowError, OSError):
        moment = datetime.fromtimestamp(0.0, timezone.utc)
    return moment.isoformat(timespec="seconds")


def _about_twins(plan: Plan, twins: Sequence[Record]) -> str:
    if twins:
        return f"{len(twins)} fault-free {'twin' if len(twins) == 1 else 'twins'}"
    return "no twin was asked for" if not plan.twin else "no twin could be made"


def _environment(run: Record) -> Mapping[str, Any]:
    """The artifact `environment`. Empty if it is missing or malformed."""
    found = run.artifacts.get("environment")
    return {} if not isinstance(found, dict) or not isinstance(found.get("reproduce", []), list) else found


def _jumps(run: Record) -> list[str]:
    """A note about the first gradient whose norm is not finite, or far from the norms before it, with the number of
    further such gradients."""
    jumps = [event for event in run.of_kind(Kind.NOTE) if "norm" in event.data]
    if not jumps:
        return []
    first, more = jumps[0], len(jumps) - 1
    done = run.history.steps_done(first.rank, first.attempt, first.mono_s)
    step = f"in step {done + 1}" if done is not None else f"in attempt {first.attempt or 0}"
    far = ", far from the steps before" if math.isfinite(first.data["norm"]) else ""
    again = f", and {more} more such {'note' if more == 1 else 'notes'} came later" if more else ""
    return [f"{first.data['text']} {step} on rank {first.rank or 0}{far}{again}"]


def _notes(run: Record, twins: Sequence[Record]) -> list[str]:
    notes = [str(event.data["text"]) for event in run.of_kind(Kind.NOTE) if "norm" not in event.data]
    notes += _jumps(run)
    notes += [f"the agent's hook {e.data['hook']} failed: {e.data['error']}" for e in run.of_kind(Kind.AGENT_FAILED)]
    if twins and (apart := ranks_apart(twins[0])):
        notes += [f"without a fault too, the parameters of the ranks, equal at first, differ from step {apart.step} on"]
    return list(dict.fromkeys([*notes, *causes_in_words(run)]))
