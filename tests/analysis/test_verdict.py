"""The gates and the verdict: when a run passes, and when it must not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from torchaos.harness.analysis.felt_evidence import died, stood_still
from torchaos.harness.analysis.recovery_times import recoveries
from torchaos.harness.analysis.replica_verdict import ranks_alone
from torchaos.harness.analysis.verdict import judge, verdict_of
from torchaos.harness.interfaces import Target, UsageError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Event, Kind, Phase
from torchaos.harness.record.plan import ENDED_BEFORE, After, Named, Plan, PlannedFault, PlannedJob
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import ExitCode, Result, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.terminal.console import show
from torchaos.harness.running.conditions.progress import after_is_due

JOB = PlannedJob(("torchrun", "train.py"), "/job", {}, 2, 1, 60.0)
KILL = PlannedFault("kill", "process.kill", "rank", Target((1,)), Moment(1, 18, Phase.BACKWARD), {}, "", "")
ROLLED_BACK = {"fault": "kill", "verified": True, "reason": ""}


def judged(
    run: Record, *faults: PlannedFault, asserts: tuple[str, ...] = ("restarts",), twins: Sequence[Record] = ()
) -> Result:
    plan = replace(run.plan, faults=faults or (KILL,), asserts=tuple(Named(name, {}) for name in asserts))
    return verdict_of(replace(run, plan=plan), twins, "/run")


def plus(run: Record, *more: Event) -> Record:
    """A record is in order of time, as reading a run directory makes it."""
    return replace(run, events=tuple(sorted((*run.events, *more), key=lambda event: event.mono_s)))


def without(run: Record, *kinds: Kind) -> Record:
    return replace(run, events=tuple(event for event in run.events if event.kind not in kinds))


def first(run: Record, kind: Kind) -> Event:
    return next(event for event in run.events if event.kind is kind)


_seq = count(10_000)


def at(near: Event, kind: Kind, data: dict[str, Any], after: float = 0.0001, **envelope: Any) -> Event:
    """An event of the harness, so long after another one."""
    return Event(kind, "harness", next(_seq), 0.0, near.mono_s + after, data=data, **envelope)


def test_a_kill_that_was_outlived_passes(trainer: Any) -> None:
    """The ideal trainer, killed in step 18 and resumed from step 15, passes every gate."""
    result = judged(trainer(kills=[(18, 1)]).record())
    assert (result.verdict, result.exit_code) == (Verdict.PASSED, ExitCode.PASSED), result.reason


def test_a_step_that_the_others_ended_is_no_recovery(trainer: Any) -> None:
    """Killed in the optimizer, the victim had given its gradients: the other rank ends the step, and that is all."""
    run = trainer(kills=[(18, 1)], steps=18).record()
    dead = [
        e for e in run.events if e.attempt in (None, 0) and e.kind not in (Kind.ELASTIC_RENDEZVOUS, Kind.JOB_EXITED)
    ]
    hit = next(e for e in dead if e.kind is Kind.APPLYING)
    last = next(e for e in reversed(dead) if e.kind is Kind.STEP and e.rank == 0)
    step = replace(last, mono_s=hit.mono_s + 0.001, step=18)
    ended = at(dead[-1], Kind.JOB_EXITED, {"submission": 0, "pid": 50, "exit_code": 1})
    result = judged(plus(replace(run, events=tuple(dead)), step, ended))
    assert result.verdict is Verdict.FAILED, result.reason
    assert "never got past step 18" in result.reason


def test_orphans_that_go_on_are_no_recovery(trainer: Any) -> None:
    """The workers of a torchrun that was killed make steps, as orphans: the job has not come back by that."""
    run = trainer(steps=30).record()
    middle = next(e for e in run.events if e.kind is Kind.STEP and e.step == 17)
    hit = at(middle, Kind.APPLYING, {"fault": "agent", "pid": 77, "phase": None, "global_step": None})
    gone = at(run.events[-1], Kind.JOB_EXITED, {"submission": 0, "pid": 50, "exit_code": -9})
    fault = PlannedFault("agent", "process.kill_agent", "node", Target((0, 1), (0,)), After(1.0), {}, "", "")
    plan = replace(run.plan, faults=(fault,))
    record = replace(plus(without(run, Kind.JOB_EXITED), hit, gone), plan=plan)
    assert recoveries(record)[0].parts["caught_up"] is None


def test_steps_in_a_grace_period_are_no_recovery(trainer: Any) -> None:
    """A rank that was told to go makes its last steps before it leaves: it has not outlived the fault by that."""
    run = trainer(kills=[(18, 1)]).record()
    early = next(e for e in run.events if e.kind is Kind.STEP and (e.rank, e.step, e.attempt) == (1, 15, 0))
    hit = at(early, Kind.APPLYING, {"fault": "go", "pid": 1001, "phase": None, "global_step": None}, rank=1, attempt=0)
    fault = PlannedFault("go", "process.terminate", "node", Target((1,)), After(1.0), {}, "", "")
    record = replace(plus(run, hit), plan=replace(run.plan, faults=(fault,)))
    found = next(one for one in recoveries(record) if one.fault == "go")
    assert found.lost_steps == 2
    assert found.parts["caught_up"] is not None
    assert found.parts["caught_up"] > 1.0


def test_a_freeze_seen_by_the_log_of_another_rank_is_outlived(trainer: Any) -> None:
    """Where only a log tells, it tells of one rank: its steps show that the frozen one goes on."""
    run = trainer(steps=30, log_only=1).record()
    middle = next(e for e in run.events if e.kind is Kind.LOG_STEP and e.data["step"] == 17)
    hit = at(middle, Kind.APPLYING, {"fault": "f", "pid": 1001, "phase": None, "global_step": None}, rank=1, attempt=0)
    fault = PlannedFault("f", "process.freeze", "node", Target((1,)), After(1.0), {}, "", "")
    record = replace(plus(run, hit), plan=replace(run.plan, faults=(fault,)))
    assert recoveries(record)[0].parts["caught_up"] is not None


def test_a_fault_in_the_first_step_can_be_outlived(trainer: Any) -> None:
    """Before the first step nothing had been reached, and the job got past that."""
    fault = replace(KILL, trigger=Moment(1, 1, Phase.BACKWARD))
    result = judged(trainer(kills=[(1, 1)]).record(), fault)
    assert result.verdict is Verdict.PASSED, result.reason


def test_a_job_that_recovers_and_then_crashes_is_failed(trainer: Any) -> None:
    """It got past the fault and ended with exit code 1: nothing that is asserted here looks at the end."""
    run = trainer(kills=[(18, 1)]).record()
    ended = at(run.events[-1], Kind.JOB_EXITED, {"submission": 0, "pid": 50, "exit_code": 1})
    result = judged(plus(without(run, Kind.JOB_EXITED), ended))
    assert result.verdict is Verdict.FAILED
    assert "exit code 1" in result.reason


def test_a_job_that_ends_with_an_error_without_a_fault_too_is_inconclusive(trainer: Any) -> None:
    """Its twin, which is none, had ended with the same exit code in the same step: the fault did not do that. Another
    step or exit code is the fault's."""
    run = trainer(kills=[(18, 1)]).record()
    ended = at(run.events[-1], Kind.JOB_EXITED, {"submission": 0, "pid": 50, "exit_code": 1})
    verdicts = []
    for twin in ([1, 30], [1, 29], [2, 30]):
        note = at(run.events[-1], Kind.NOTE, {"text": "the fault-free twin failed: exit code 1", "twin": twin})
        result = judged(plus(without(run, Kind.JOB_EXITED), ended, note))
        verdicts.append((result.verdict, "as it does without a fault" in result.reason))
    assert verdicts == [(Verdict.INCONCLUSIVE, True), (Verdict.FAILED, False), (Verdict.FAILED, False)]


@pytest.mark.parametrize("caught_up", [True, False])
def test_a_job_that_runs_into_its_time_out_without_a_fault_too_is_inconclusive(trainer: Any, caught_up: bool) -> None:
    """Its twin, which is none, had not ended by the time-out either, whether the job had caught up by then or not. If
    it had, or if the run was ended by something else, the job is failed."""
    run = without(trainer(kills=[(18, 1)]).record(), Kind.JOB_EXITED)
    until = 25 if caught_up else 17
    cut_s = next(e.mono_s for e in run.events if e.kind is Kind.STEP and e.attempt == 1 and e.step == until - 15)
    run = replace(run, events=tuple(event for event in run.events if event.mono_s <= cut_s))
    last, found = run.events[-1], []
    for twin, timed_out in (([None, 20], True), ([1, 20], True), ([None, 20], False)):
        note = at(last, Kind.NOTE, {"text": "the fault-free twin failed", "twin": twin})
        end = {"reason": "it took too long", "interrupted": False, "enough": False, "timed_out": timed_out}
        result = judged(plus(run, note, at(last, Kind.STOPPED, end)), asserts=("completed", "recovery_time"))
        found.append((result.verdict, "write a longer job.timeout" in result.reason))
    assert found == [(Verdict.INCONCLUSIVE, True), (Verdict.FAILED, False), (Verdict.FAILED, False)]


def test_nothing_is_failed_on_a_damaged_journal(trainer: Any) -> None:
    """What the lines said that can't be read may have been what an assertion lacks; that goes for a twin's, too."""
    run = trainer(kills=[(18, 1)]).record()
    ended = at(run.events[-1], Kind.JOB_EXITED, {"submission": 0, "pid": 50, "exit_code": 1})
    failed, damaged = plus(without(run, Kind.JOB_EXITED), ended), ("harness.jsonl:7",)
    assert judged(failed, twins=[run]).verdict is Verdict.FAILED
    for result in (judged(replace(failed, damaged=damaged)), judged(failed, twins=[replace(run, damaged=damaged)])):
        assert (result.verdict, "harness.jsonl:7" in result.reason) == (Verdict.INCONCLUSIVE, True)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_fault_is_outlived_if_each_rank_with_steps_of_its_own_outlives_it(trainer: Any, goes_on: bool) -> None:
    """One rank makes two steps while the other makes three, as in local SGD, so that no step after the restart is that
    of both. If that rank does not get past its own highest step, nothing shows that the job has recovered."""

    def fewer(event: Event) -> Event | None:
        if event.rank != 1 or event.step is None:
            return event
        step, counted = (n - n // 3 for n in (event.step, event.data.get("opt_step") or 0))
        if event.kind is not Kind.STEP:
            return replace(event, step=step)
        left_out = event.step % 3 == 0 or (event.attempt == 1 and step > 2 and not goes_on)
        return None if left_out else replace(event, step=step, data={**event.data, "opt_step": counted})

    run = trainer(kills=[(18, 0)], named=True, state_seen=True).record()
    run = replace(run, events=tuple(filter(None, map(fewer, run.events))))
    assert run.history.unplaced == (1,)
    result = judged(run, replace(KILL, target=Target((0,)), trigger=Moment(0, 18, Phase.BACKWARD)))
    assert result.verdict is (Verdict.PASSED if goes_on else Verdict.INCONCLUSIVE), result.reason
    assert ("rank 1" in result.reason) is not goes_on
    assert (result.recoveries[0].parts["caught_up"] is not None) is goes_on


def test_ranks_that_repeat_prove_nothing(trainer: Any) -> None:
    """Two torchruns side by side, as torchft has them, number their ranks alike: whose steps are whose nobody knows."""
    run = trainer(kills=[(18, 1)]).record()
    assert judged(run, twins=[trainer().record()]).verdict is Verdict.PASSED
    other = [replace(e, source="rank0-of-another", mono_s=e.mono_s + 0.001) for e in run.events if e.kind is Kind.STEP]
    result = judged(plus(run, *(e for e in other if e.rank == 0 and e.attempt == 0)), twins=[trainer().record()])
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "rank 0 of attempt 0 was 2 processes" in result.reason


def test_a_job_that_ends_early_with_code_0_is_failed_by_the_twin(trainer: Any) -> None:
    """A rank that leaves with code 0 may end the whole job, and the twin shows that there were steps left."""
    run = trainer(kills=[(18, 1)]).record()
    early = [e for e in run.events if e.attempt in (None, 0) and e.kind is not Kind.ELASTIC_RENDEZVOUS]
    result = judged(replace(run, events=tuple(early)), twins=[trainer().record()])
    assert result.verdict is Verdict.FAILED, result.reason
    result = judged(replace(run, events=tuple(early)), twins=[trainer(steps=17).record()])
    assert result.verdict is Verdict.INCONCLUSIVE, result.reason


def test_a_fault_that_lands_less_often_than_planned_is_inconclusive(trainer: Any) -> None:
    """`times: 2` and one landing: the second was not tried."""
    result = judged(trainer(kills=[(18, 1)]).record(), replace(KILL, times=2))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "1 of 2 times" in result.reason
    assert judged(trainer(kills=[(18, 1), (18, 1)]).record(), replace(KILL, times=2)).verdict is Verdict.PASSED


def test_the_last_landing_must_be_outlived(trainer: Any) -> None:
    """Of two landings the job outlives the first, and dies of the second."""
    run = trainer(kills=[(10, 1), (18, 1)]).record()
    dead = [e for e in run.events if e.attempt != 2 and e.kind is not Kind.JOB_EXITED]
    ended = at(dead[-1], Kind.JOB_EXITED, {"submission": 0, "pid": 50, "exit_code": 1})
    fault = replace(KILL, times=2, trigger=Moment(1, None, None))
    result = judged(plus(replace(run, events=tuple(dead)), ended), fault)
    assert result.verdict is Verdict.FAILED, result.reason


def test_a_landing_beside_a_miss_is_inconclusive(trainer: Any) -> None:
    """A hold that expired while the fault was on its way: the rank had gone on, so it did not land at its Moment."""
    run = trainer(kills=[(18, 1)]).record()
    miss = at(first(run, Kind.APPLYING), Kind.MISSED, {"fault": "kill", "reason": "hold expired"})
    result = judged(plus(run, miss))
    assert (result.verdict, "hold expired" in result.reason) == (Verdict.INCONCLUSIVE, True)


@pytest.mark.parametrize(("attempt", "verdict"), [(1, Verdict.PASSED), (0, Verdict.INCONCLUSIVE)])
def test_an_order_that_comes_again_after_the_landing(trainer: Any, attempt: int, verdict: Verdict) -> None:
    """A scheduler started the job again, and the new attempt got an order that had been carried out: no miss."""
    run = trainer(kills=[(18, 1)]).record()
    hit = first(run, Kind.APPLYING)
    data = {"fault": "kill", "reason": "step 18 was over"}
    late = at(run.events[-2], Kind.MISSED, data, rank=1, attempt=attempt)
    events = tuple(replace(event, attempt=0) if event is hit else event for event in run.events)
    result = judged(plus(replace(run, events=events), late))
    assert result.verdict is verdict, result.reason


@pytest.mark.parametrize(
    "when", [Moment(1, None, Phase.FORWARD, attempt=0), Moment(1, None, Phase.BACKWARD, attempt=1)]
)
def test_phase_and_attempt_are_checked_without_a_step(trainer: Any, when: Moment) -> None:
    """A trigger that names no step still names a phase and an attempt."""
    result = judged(trainer(kills=[(18, 1)]).record(), replace(KILL, trigger=when))
    assert result.verdict is Verdict.INCONCLUSIVE, result.reason
    assert "it was planned for" in result.reason


def test_an_outside_fault_that_comes_after_the_hold_is_inconclusive(trainer: Any) -> None:
    """The pacer was held in step 18 of attempt 0, died in the hold, and its successor was hit."""
    run = trainer(kills=[(18, 1), (20, 1)]).record()
    hits = [e for e in run.events if e.kind is Kind.APPLYING]
    held = replace(hits[0], kind=Kind.HELD, data={"fault": "kill", "phase": "backward", "global_step": 18})
    events = [e for e in run.events if e is not hits[0]]
    result = judged(plus(replace(run, events=tuple(events)), held), replace(KILL, where="node"))
    assert result.verdict is Verdict.INCONCLUSIVE, result.reason
    assert "landed in attempt 1" in result.reason


def test_what_changes_nothing_needs_no_rollback(trainer: Any) -> None:
    """An irreversible fault with a trigger from outside has no handle and no page: nothing is left to take back."""
    run = trainer(kills=[(18, 1)]).record()
    guarded = at(run.events[0], Kind.GUARDED, {"record": "kill", "handles": [], "why": "it is dead"})
    assert judged(plus(run, guarded)).exit_code is ExitCode.PASSED


def test_what_was_guarded_again_must_be_taken_back_again(trainer: Any) -> None:
    """Taking back the first firing says nothing of the second; and nothing passes with something left behind."""
    run = trainer(kills=[(18, 1)]).record()
    start, end = run.events[0], run.events[-1]
    guards = [at(one, Kind.GUARDED, {"record": "kill", "handles": ["process"]}) for one in (start, end)]
    back = at(start, Kind.ROLLED_BACK, ROLLED_BACK, after=0.001)
    result = judged(plus(run, *guards, back))
    assert (result.verdict, result.exit_code) == (Verdict.ERROR, ExitCode.ROLLBACK)
    assert judged(plus(run, *guards, back, at(end, Kind.ROLLED_BACK, ROLLED_BACK, 1.0))).verdict is Verdict.PASSED


@pytest.mark.parametrize("asserts", [("restarts",), ("clean_exit",)])
def test_what_could_not_be_taken_back_is_said_beside_any_verdict(trainer: Any, asserts: tuple[str, ...]) -> None:
    """A run that would pass is an error; one that does not keeps its verdict and reason, and the exit code says it."""
    run = trainer(kills=[(18, 1)]).record()
    back = at(run.events[-1], Kind.ROLLED_BACK, {"fault": "kill", "verified": False, "reason": "the disk is gone"})
    was, result = judged(run, asserts=asserts), judged(plus(run, back), asserts=asserts)
    assert result.exit_code is ExitCode.ROLLBACK
    assert result.cases[-1].verdict is Verdict.ERROR
    assert result.cases[-1].reason == "kill could not be undone: the disk is gone"
    if was.verdict is Verdict.PASSED:
        assert (result.verdict, result.decided_by) == (Verdict.ERROR, "rollback")
    else:
        assert (result.verdict, result.reason) == (was.verdict, was.reason)


@pytest.mark.parametrize(("bounds", "verdict"), [({"gives_up_within": 60.0}, Verdict.PASSED), ({}, Verdict.FAILED)])
def test_a_job_that_is_to_give_up_need_not_recover(trainer: Any, bounds: dict[str, Any], verdict: Verdict) -> None:
    """It died of the fault and said so by its exit code: that is what the scenario asks for, or else a failure."""
    run = trainer(kills=[(18, 1)]).record()
    dead = [
        e for e in run.events if e.attempt in (None, 0) and e.kind not in (Kind.ELASTIC_RENDEZVOUS, Kind.JOB_EXITED)
    ]
    ended = at(dead[-1], Kind.JOB_EXITED, {"submission": 0, "pid": 50, "exit_code": 1})
    plan = replace(run.plan, faults=(KILL,), asserts=(Named("restarts", bounds),))
    result = verdict_of(replace(run, plan=plan, events=(*dead, ended)), [], "/run")
    assert result.verdict is verdict, result.reason


def test_a_run_without_an_end_is_never_passed(trainer: Any) -> None:
    """The harness was killed in the middle: what is there looks well, and nobody knows the rest."""
    run = trainer(kills=[(18, 1)]).record()
    stage = at(run.events[0], Kind.STAGE, {"stage": "run"})
    result = judged(plus(run, stage))
    assert (result.verdict, "never finished" in result.reason) == (Verdict.INCONCLUSIVE, True)
    assert judged(plus(run, stage, at(run.events[-1], Kind.STAGE, {"stage": "end"}))).verdict is Verdict.PASSED


@pytest.mark.parametrize("name", ["plan.json", "artifacts/environment.json"])
def test_a_damaged_run_directory_is_bad_usage(tmp_path: Path, name: str) -> None:
    """Half a file in a run directory gives one sentence, and no traceback."""
    folder = RunDir(tmp_path / "run").create()
    Plan("x", "", 0, JOB, (), ()).write(folder.plan)
    (folder.root / name).write_text('{"half":')
    with pytest.raises(UsageError, match=str(folder.root)):
        judge(folder)


def test_an_exception_that_the_job_caught_was_not_felt(trainer: Any) -> None:
    """The rank went on to end steps after the exception, and died of something else with the same exit code."""
    run = trainer(kills=[(18, 1)]).record()
    step = next(e for e in run.events if e.kind is Kind.STEP and (e.rank, e.step) == (1, 9))
    hit = replace(step, kind=Kind.APPLYING, mono_s=step.mono_s + 0.001,
                  data={"fault": "oops", "pid": 1001, "phase": None, "global_step": 10})  # fmt: skip
    assert died(plus(run, hit), "oops", -9) is None
    assert died(run, "kill", -9) is not None


def test_what_the_others_had_under_way_does_not_hide_a_stand_still(trainer: Any) -> None:
    """A rank that is held in the optimizer has given its gradients: the others end that step, and then all wait."""
    run = trainer(freeze=(10, 1, 3.0)).record()
    hit = first(run, Kind.APPLYING)
    peers = next(e for e in run.events if e.kind is Kind.STEP and (e.rank, e.step) == (0, 10))
    early = replace(run, events=tuple(replace(e, mono_s=hit.mono_s + 0.01) if e is peers else e for e in run.events))
    ordered = plus(early)
    assert stood_still(ordered, "freeze", 3.0) is not None
    assert stood_still(ordered, "freeze", 5.0) is None


def test_each_stand_still_needs_its_proof(trainer: Any) -> None:
    """A fault that landed twice was felt twice, or not."""
    run = trainer(freeze=(10, 1, 3.0)).record()
    hit = first(run, Kind.APPLYING)
    again = replace(hit, mono_s=next(e.mono_s for e in run.events if e.step == 20) + 0.0001)
    assert stood_still(run, "freeze", 3.0) is not None
    assert stood_still(plus(run, again), "freeze", 3.0) is None


def test_recovered_means_more_than_what_others_had_under_way(trainer: Any) -> None:
    """A fault that waits for the recovery from another does not take the end of the step that was hit for it."""
    run = trainer(kills=[(18, 1)]).record()
    hit = first(run, Kind.APPLYING)
    last = next(e for e in run.events if e.kind is Kind.STEP and (e.rank, e.step, e.attempt) == (0, 17, 0))
    step = replace(last, mono_s=hit.mono_s + 0.001, step=18)
    dead = [e for e in run.events if e.mono_s <= hit.mono_s + 0.002]
    after = After(0.0, "kill", "recovered")
    assert not after_is_due(after, [*dead, step], hit.mono_s + 1.0)
    assert after_is_due(after, run.events, run.events[-1].mono_s)


def test_without_the_twin_that_was_wanted_nothing_passes_that_needs_it(trainer: Any) -> None:
    """The job failed even without a fault: what can be told without a measure is not what was asked. With `twin: none`
    it was asked for."""
    run = trainer(kills=[(18, 1)]).record()
    wanted = replace(run, plan=replace(run.plan, twin={"runs": 3}))
    asserts = ("sample_accounting",)
    result = judged(wanted, asserts=asserts)
    assert (result.verdict, "could not be made" in result.reason) == (Verdict.INCONCLUSIVE, True)
    assert judged(run, asserts=asserts).verdict is Verdict.PASSED
    assert judged(wanted, asserts=asserts, twins=[trainer().record()]).verdict is Verdict.PASSED


def test_what_never_came_does_not_excuse_a_job_that_is_stuck(trainer: Any) -> None:
    """Killed in step 18 and never back: the fault that was to follow could not come, and the job has failed. One that
    was to come before, and did not, leaves it inconclusive."""
    run = trainer(kills=[(18, 1)]).record()
    dead = [e for e in run.events if e.attempt in (0, None) and e.kind is not Kind.JOB_EXITED]
    ended = Event(Kind.MISSED, "harness", 9999, 0.0, dead[-1].mono_s, data={"fault": "next", "reason": ENDED_BEFORE})
    for trigger, verdict in (
        (After(1.0, "kill", "recovered"), Verdict.FAILED),
        (Moment(1, 25, None), Verdict.FAILED),
        (Moment(1, 5, None), Verdict.INCONCLUSIVE),
    ):
        later = PlannedFault("next", "process.kill", "node", Target((1,)), trigger, {}, "", "")
        assert judged(replace(run, events=(*dead, ended)), KILL, later, asserts=()).verdict is verdict, trigger


def test_a_trigger_beyond_the_end_of_the_job_says_both_steps(trainer: Any) -> None:
    """The job was over before the fault's step came: whoever reads that chooses an earlier step."""
    run = trainer().record()
    end_s = run.events[-1].mono_s
    missed = {"fault": "kill", "reason": ENDED_BEFORE, "ended_before": True}
    late = replace(KILL, trigger=Moment(1, 500, None))
    result = judged(plus(run, Event(Kind.MISSED, "harness", 9999, 0.0, end_s, data=missed)), late, asserts=())
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "the job ended at step 30; the fault was planned for step 500" in result.reason


@pytest.mark.parametrize(("code", "logged", "told"), [(0, False, True), (1, True, True), (1, False, False)])
def test_a_job_whose_ranks_were_not_found_says_what_a_rank_is(
    trainer: Any, code: int, logged: bool, told: bool
) -> None:
    """A fault that never landed in a job that worked, by its exit code or the steps in its log, while none of its
    processes was a rank: whoever reads that starts the job by torchrun. A job that failed before a step has no such
    reason."""
    run = trainer().record()
    begun, ended = run.events[0], run.events[-1]
    data = {"fault": "kill", "reason": ENDED_BEFORE, "ended_before": True}
    missed = replace(ended, kind=Kind.MISSED, data=data)
    line = replace(begun, kind=Kind.LOG_STEP, mono_s=begun.mono_s + 1.0, data={"step": 3, "loss": 2.5, "lr": None})
    end = replace(ended, data={**ended.data, "exit_code": code})
    events = (begun, *([line] if logged else []), missed, end)
    reason = judged(replace(run, events=events), asserts=()).faults[0].reason
    said = "it never landed: no rank was found; a process is a rank if it has RANK, LOCAL_RANK and TORCHELASTIC_RUN_ID"
    assert reason.startswith(said) is told, reason
    assert "no rank was found" not in judged(plus(run, missed), asserts=()).faults[0].reason


def test_a_trigger_in_a_rank_that_makes_no_steps_says_so(trainer: Any) -> None:
    """A rank that only serves data: its step never comes, however long the job trains. Where the agent saw no step of
    any rank, no rank is blamed."""
    run = trainer().record()
    missed = {"fault": "kill", "reason": ENDED_BEFORE, "ended_before": True}
    run = plus(run, Event(Kind.MISSED, "harness", 9999, 0.0, run.events[-1].mono_s, data=missed))
    run = replace(run, events=tuple(e for e in run.events if e.kind is not Kind.STEP or e.rank != 1))
    result = judged(run, replace(KILL, trigger=Moment(1, 5, None)), asserts=())
    assert "no step of rank 1 was seen; the fault was planned for its step 5" in result.reason
    logged = trainer(log_only=1).record()
    result = judged(
        plus(logged, Event(Kind.MISSED, "harness", 9999, 0.0, logged.events[-1].mono_s, data=missed)),
        replace(KILL, trigger=Moment(1, 5, None)), asserts=(),
    )  # fmt: skip
    assert "only the job's log shows steps, and the agent none; the fault was planned for step 5" in result.reason


def test_a_run_that_was_ended_in_a_recovery_is_no_failure(trainer: Any) -> None:
    """On purpose, a second after the kill: nobody knows whether the job would have come back."""
    run = trainer(kills=[(18, 1)]).record()
    hit = first(run, Kind.APPLYING)
    stopped = Event(
        Kind.STOPPED, "harness", 9999, 0.0, hit.mono_s + 1.0,
        data={"reason": "enough", "interrupted": False, "enough": True},
    )  # fmt: skip
    run = replace(run, events=(*(e for e in run.events if e.mono_s <= hit.mono_s), stopped))
    assert judged(run, asserts=("recovery_time",)).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("until", "verdict"),
    [
        ("died", Verdict.INCONCLUSIVE),
        ("back", Verdict.INCONCLUSIVE),
        ("steps", Verdict.PASSED),
        ("end", Verdict.PASSED),
    ],
)
@pytest.mark.parametrize("seen", [True, False])
def test_a_run_that_was_ended_while_the_job_was_down_does_not_pass(
    trainer: Any, until: str, verdict: Verdict, seen: bool
) -> None:
    """It got past the kill, died again of nothing that was done to it, and was ended on purpose before it was back:
    nobody knows. That it dies after the end is none of ours; whether its steps can be counted is no matter."""
    blind = {} if seen else {f"{what}_seen": False for what in ("loads", "counters", "samples", "losses")}
    run = trainer(kills=[(18, 1), (24, 0)], **blind).record()
    second = list(run.of_kind(Kind.APPLYING))[1]
    died = min(e.mono_s for e in run.events if e.kind is Kind.RANK_EXITED and e.attempt == 1)
    moments = {
        "steps": died - 0.001, "died": died, "back": min(e.mono_s for e in run.events if e.attempt == 2),
        "end": run.events[-1].mono_s,
    }  # fmt: skip
    data = {"reason": "", "interrupted": False, "enough": True}
    stopped = replace(at(first(run, Kind.JOB_STARTED), Kind.STOPPED, data), mono_s=moments[until])
    kept = [e for e in run.events if e is not second and e.kind is not Kind.JOB_EXITED]
    result = judged(plus(replace(run, events=tuple(kept)), stopped), asserts=("recovery_time",))
    if seen:
        assert result.verdict is verdict, result.reason
    assert ("down again" in result.reason) is (seen and verdict is Verdict.INCONCLUSIVE), result.reason


def test_a_job_that_waits_for_its_next_submission_has_not_ended(trainer: Any) -> None:
    """It got past the fault, died, and was to be submitted again when the run was ended on purpose: it has not failed.
    With no submission left it has."""
    run = trainer(kills=[(18, 1)], steps=30).record()
    steps = [e for e in run.events if e.kind not in (Kind.JOB_EXITED, Kind.RANK_EXITED, Kind.AGENT_ENDED)]
    killed = [e for e in run.events if e.kind is Kind.RANK_EXITED and e.attempt == 0]
    gone = at(steps[-1], Kind.JOB_EXITED, {"submission": 0, "pid": 50, "exit_code": 1}, after=0.01)
    stopped = at(gone, Kind.STOPPED, {"reason": "", "interrupted": False, "enough": True}, after=0.01)
    for times, verdict in ((1, Verdict.INCONCLUSIVE), (0, Verdict.FAILED)):
        job = replace(run.plan.job, resubmit_times=times)
        record = replace(run, plan=replace(run.plan, job=job), events=tuple(steps))
        result = judged(plus(record, *killed, gone, stopped), asserts=("recovery_time",))
        assert result.verdict is verdict, result.reason


def test_a_fault_that_was_recovered_from_excuses_no_later_one(trainer: Any) -> None:
    """The second kill is never recovered from, and the run was ended for that: it has failed."""
    run = trainer(kills=[(18, 1), (24, 0)]).record()
    hit = list(run.of_kind(Kind.APPLYING))[1]
    hit = replace(hit, data={**hit.data, "fault": "second"})
    dies = (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE)
    back = next(e.mono_s for e in run.events if e.attempt == 2)
    kept = [
        e
        for e in run.events
        if e.mono_s <= hit.mono_s
        or (e.kind in dies and e.mono_s <= back)
        or (e.attempt, e.kind) == (2, Kind.AGENT_STARTED)
    ]
    events = (*(e for e in kept if e.mono_s != hit.mono_s), hit)
    ended = {"reason": "the stop condition no_progress holds", "interrupted": False, "enough": False}
    stopped = at(hit, Kind.STOPPED, ended, after=10.0)
    second = replace(KILL, id="second", target=Target((0,)), trigger=Moment(0, 24, Phase.BACKWARD))
    result = judged(plus(replace(run, events=events), stopped), KILL, second, asserts=("recovery_time",))
    assert [one.verdict for one in result.faults] == [Verdict.PASSED, Verdict.FAILED], result.faults


def test_the_step_under_way_is_no_recovery_of_a_job_that_then_died(trainer: Any) -> None:
    """Frozen late in a step that was ended all the same: the job stood still, died, and came back from a checkpoint."""
    run = trainer(kills=[(13, 1)]).record()
    at = max(e.mono_s for e in run.events if e.kind is Kind.STEP and e.attempt == 0 and e.step == 12) - 0.0001
    hit = replace(first(run, Kind.APPLYING), mono_s=at, data={**first(run, Kind.APPLYING).data, "fault": "slow"})
    run = replace(run, events=(*(e for e in run.events if e.kind is not Kind.APPLYING), hit))
    fault = PlannedFault("slow", "process.freeze", "node", Target((1,)), After(1.0), {}, "", "")
    (found,) = recoveries(replace(run, plan=replace(run.plan, faults=(fault,))))
    assert found.parts["first_step"] is not None, "it was restarted"
    assert found.lost_steps == 2


def test_a_clock_beyond_all_calendars_is_borne_with(trainer: Any) -> None:
    """An event of a damaged journal may tell of the year 33658: the verdict is had all the same."""
    run = trainer(kills=[(18, 1)]).record()
    far = replace(run, events=(replace(run.events[0], wall_s=1e12), *run.events[1:]))
    result = judged(far)
    assert (result.verdict, result.started) == (Verdict.PASSED, "1970-01-01T00:00:00+00:00"), result.reason


def test_a_failure_stands_though_nothing_was_left_to_recover_for(trainer: Any) -> None:
    """The fault landed and was felt, after the last step: the run is evidence, and a rank that failed is a failure. A
    fault that landed elsewhere is no evidence of anything, and hides what seems to have failed."""
    run = trainer(steps=17).record()
    last = next(e for e in reversed(run.events) if e.kind is Kind.STEP and e.rank == 1)
    hit = {"fault": "kill", "phase": "backward", "global_step": 18, "pid": 1001}
    gone = [e for e in run.of_kind(Kind.RANK_EXITED) if e.rank == 1]
    killed = [replace(e, data={**e.data, "exit_code": -9}) if e in gone else e for e in run.events]
    run = plus(replace(run, events=tuple(killed)), at(last, Kind.APPLYING, hit, rank=1, attempt=0))
    result = judged(run, asserts=("completed",), twins=[trainer(steps=17).record()])
    assert result.faults[0].verdict is Verdict.INCONCLUSIVE
    assert (result.verdict, result.decided_by) == (Verdict.FAILED, "completed"), result.reason
    elsewhere = replace(KILL, trigger=Moment(1, 12, Phase.BACKWARD))
    hidden = judged(run, elsewhere, asserts=("completed",), twins=[trainer(steps=17).record()])
    assert (hidden.verdict, hidden.decided_by) == (Verdict.INCONCLUSIVE, "faults"), hidden.reason


def test_a_result_names_the_case_that_decided(trainer: Any) -> None:
    """None where it passed; results from before the field say it by their reason."""
    run = trainer(kills=[(18, 1)]).record()
    assert judged(run).decided_by == ""
    assert judged(plus(run, at(run.events[-1], Kind.STOPPED, {"reason": "Ctrl-C"}))).decided_by == ""
    result = judged(run, asserts=("restarts", "clean_exit"))
    assert result.decided_by == "clean_exit"
    raw = result.to_json()
    assert Result.from_json(raw) == result
    del raw["decided_by"]
    assert Result.from_json(raw).decided_by == "clean_exit"


def ended_early(run: Record, twins: Sequence[Record], attempt: int = 1, interrupted: bool = True) -> Result:
    """The run, ended by somebody when the ranks of this attempt were up and had made no step."""
    again = next(e for e in run.events if e.kind is Kind.STEP and e.attempt == attempt)
    seen = [e for e in run.events if e.mono_s < again.mono_s]
    stopped = at(seen[-1], Kind.STOPPED, {"reason": "SIGTERM ended it", "interrupted": interrupted, "enough": False})
    ended = at(stopped, Kind.JOB_EXITED, {"submission": 0, "pid": 50, "exit_code": -15})
    asserts = ("recovery_time", "loss_continuity", "sample_accounting", "completed", "lr_continuity")
    return judged(replace(run, events=(*seen, stopped, ended)), asserts=asserts, twins=twins)


def test_what_an_early_end_left_open_is_no_failure_of_the_job(trainer: Any) -> None:
    """Somebody ended the run while the job was coming back: nothing failed, and nothing says that it never caught up.
    A run that its own stop condition ended is judged."""
    run, twins = trainer(kills=[(18, 1)]).record(), [trainer().record()]
    result = ended_early(run, twins)
    assert (result.verdict, result.reason) == (Verdict.INCONCLUSIVE, "the run was ended early: SIGTERM ended it")
    cases = {case.name: case for case in result.cases}
    assert not [name for name, case in cases.items() if case.verdict is Verdict.FAILED]
    assert {cases[name].reason for name in ("recovery_time", "loss_continuity", "completed")} == {
        "not judged, because the run was ended early"
    }
    (fault,) = result.faults
    assert (fault.verdict, fault.reason) == (Verdict.INCONCLUSIVE, "not judged, because the run was ended early")
    console = Console(file=StringIO(), width=80)
    show(result, console, whole=False)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "process.kill → rank 1: not judged, because the run was ended early" in said
    assert "never caught up" not in said
    judged_all_the_same = ended_early(run, twins, interrupted=False)
    assert {case.name for case in judged_all_the_same.cases if case.verdict is Verdict.FAILED} >= {
        "faults", "recovery_time", "completed"
    }  # fmt: skip


def test_what_was_wrong_before_an_early_end_stays_wrong(trainer: Any) -> None:
    """The first resume lost the moments of the optimizer, and the run was ended after a second kill."""
    run = trainer(kills=[(12, 1), (22, 1)], broken=frozenset({"optimizer"})).record()
    cases = {case.name: case for case in ended_early(run, [trainer().record()], attempt=2).cases}
    assert cases["loss_continuity"].verdict is Verdict.FAILED
    assert cases["recovery_time"].verdict is cases["completed"].verdict is Verdict.INCONCLUSIVE


def test_a_run_whose_twin_alone_was_ended_early_is_whole(trainer: Any) -> None:
    """The job had ended by itself, so its failures are its own."""
    run = trainer(stops=20).record()
    late = at(run.events[-1], Kind.STOPPED, {"reason": "Ctrl-C (SIGINT) ended it", "interrupted": True})
    result = judged(plus(run, late), asserts=("completed",), twins=[trainer().record()])
    assert {case.name: case.verdict for case in result.cases}["completed"] is Verdict.FAILED


def test_ranks_alone_need_a_twin_of_each(trainer: Any) -> None:
    """A rank that the twin does not have would be compared with nothing."""
    run = trainer(kills=[(18, 1)]).record()
    fewer = replace(run, events=tuple(
        e for e in run.events if e.kind is not Kind.STEP or (e.attempt, e.rank) != (0, 1) or e.step <= 12
    ))  # fmt: skip
    assert set(ranks_alone(fewer, [trainer().record()])) == {0, 1}
    assert ranks_alone(fewer, [trainer(world=1).record()]) == {}


@pytest.mark.parametrize("back", [True, False])
def test_a_fault_lands_by_the_count_of_the_agent_after_a_rollback_in_memory(trainer: Any, back: bool) -> None:
    """A job that goes back by itself makes steps again, and the agent counts on. No rank knows then which step that is,
    so that the fault comes in the step that the agent counts. In a job that never went back it comes in another step
    than planned."""
    job = trainer(raises=(10, 1, 0.5), kills=((18, 1),), state_seen=True, named=True, every=4)
    run = (job if back else trainer(kills=((18, 1),), state_seen=True, named=True, every=4)).record()
    raised = min((e for e in run.events if e.kind is Kind.APPLYING), key=lambda e: e.mono_s)
    events = [
        replace(e, data={**e.data, "global_step": 19}) if e.kind is Kind.APPLYING else e
        for e in run.events if not (back and e is raised)
    ]  # fmt: skip
    assert (len([part for part in run.history.segments if part.number == 0]) > 1) is back
    found = judged(replace(run, events=tuple(events)), replace(KILL, trigger=Moment(0, 19, Phase.BACKWARD)))
    assert ("planned for step 19, and landed in step 18" in found.reason) is not back, found.reason
