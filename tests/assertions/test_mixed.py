"""A job in which two processes made steps as the same rank of the same attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.interfaces import Target
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import ENDED_BEFORE, Named, PlannedFault
from torchaos.harness.record.result import Verdict


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [("rank0-a0", "rank0-a0-p2", "several torchruns"), ("rank0-a0", "rank0-a0x", "replaced its own program (exec)")],
)
def test_no_assertion_judges_steps_that_are_mixed_up(trainer: Any, first: str, second: str, why: str) -> None:
    """A shell that starts torchrun again gives the second one the attempt of the first, and a program may replace
    itself. Nobody knows which steps are whose: each assertion is inconclusive, and none says that the job was not
    restarted."""
    run = trainer().record()
    assert first in {event.source for event in run.events}
    again = [replace(e, source=second) for e in run.events if e.kind is Kind.STEP and e.rank == 0]
    asserts = tuple(Named(name, {}) for name in ("completed", "restarts", "loss_continuity"))
    run = replace(run, events=(*run.events, *again), plan=replace(run.plan, asserts=asserts, faults=()))
    found = verdict_of(run, [trainer().record()], "")
    assert [case.verdict for case in found.cases if case.name != "rollback"] == [Verdict.INCONCLUSIVE] * 3
    assert why in found.reason


def test_a_job_that_was_never_started_failed_nothing(trainer: Any) -> None:
    """The run was ended before the job began, such as by a fault that comes after the last step of the twin. No
    assertion failed, and none gives another reason for what it did not see."""
    run = trainer().record()
    why = "process.kill comes in step 120, and the job ends at step 45"
    stopped = Event(Kind.STOPPED, "harness", 0, 0.0, 1.0, data={"reason": why, "interrupted": False, "enough": False})
    asserts = tuple(Named(name, {}) for name in ("completed", "loss_continuity", "checkpoint_integrity"))
    run = replace(run, events=(stopped,), plan=replace(run.plan, asserts=asserts, faults=()))
    found = verdict_of(run, [trainer().record()], "")
    cases = [case for case in found.cases if case.name != "rollback"]
    assert (found.verdict, {case.verdict for case in cases}) == (Verdict.INCONCLUSIVE, {Verdict.INCONCLUSIVE})
    assert all(case.reason.endswith("the job was never started, so there is nothing to judge") for case in cases)
    assert why in found.reason


def test_a_run_of_which_nothing_was_recorded(trainer: Any) -> None:
    """Its twin could not be made, so its job was never started: nothing says what an agent or a fault did not do."""
    run = replace(trainer().record(), events=())
    found = verdict_of(run, [], "")
    assert (found.verdict, found.reason) == (
        Verdict.INCONCLUSIVE,
        "nothing was recorded: the job was never started, or the run's journal is gone",
    )
    assert {case.name: case.reason for case in found.cases}["rollback"] == "there was nothing to undo"


@pytest.mark.parametrize(("interrupted", "completed"), [(True, Verdict.INCONCLUSIVE), (False, Verdict.FAILED)])
def test_a_run_that_was_ended_before_its_first_step_says_so(
    trainer: Any, interrupted: bool, completed: Verdict
) -> None:
    """No agent had started and no line had been written, because the run was ended too early: nothing says that there
    was no agent. One that a person ended failed nothing; a stop condition says something about the job."""
    run = trainer().record()
    begun = next(e for e in run.events if e.kind is Kind.JOB_STARTED)
    data = {"reason": "SIGINT was received", "interrupted": interrupted, "enough": False}
    stopped = Event(Kind.STOPPED, "harness", 9, 0.0, begun.mono_s + 1, data=data)
    kill = PlannedFault("kill", "process.kill", "rank", Target((1,)), Moment(1, 20, None), {}, "", "")
    missed = Event(Kind.MISSED, "harness", 10, 0.0, begun.mono_s + 2,
                   data={"fault": "kill", "reason": ENDED_BEFORE, "ended_before": True})  # fmt: skip
    ended = Event(
        Kind.JOB_EXITED, "harness", 11, 0.0, begun.mono_s + 3, data={"exit_code": 1, "submission": 0, "pid": 1}
    )
    asserts = tuple(Named(name, {}) for name in ("loss_continuity", "sample_accounting", "completed"))
    run = replace(
        run, events=(begun, stopped, missed, ended), plan=replace(run.plan, asserts=asserts, faults=(kill,))
    )  # fmt: skip
    found = verdict_of(run, [], "")
    told = {case.name: case for case in found.cases}
    assert "agent" not in found.reason + "".join(case.reason for case in found.cases)
    for name in ("faults", "loss_continuity", "sample_accounting"):
        assert told[name].verdict is Verdict.INCONCLUSIVE
        assert "the run was ended before the job's first step was seen" in told[name].reason, told[name]
    assert told["completed"].verdict is completed


def test_what_lacks_a_landed_fault_follows_from_the_fault(trainer: Any) -> None:
    """A fault that lies past the end is told once: the assertions that need it follow from its case, and one that had
    enough to judge does not."""
    run = trainer().record()
    kill = PlannedFault("kill", "process.kill", "rank", Target((1,)), Moment(1, 900, None), {}, "", "")
    last = run.events[-1].mono_s
    missed = Event(Kind.MISSED, "harness", 9999, 0.0, last + 1,
                   data={"fault": "kill", "reason": ENDED_BEFORE, "ended_before": True})  # fmt: skip
    asserts = tuple(Named(name, {}) for name in ("recovery_time", "completed", "hang_detected"))
    run = replace(run, events=(*run.events, missed), plan=replace(run.plan, asserts=asserts, faults=(kill,)))
    found = verdict_of(run, [], "")
    assert found.decided_by == "faults"
    assert {case.name: case.follows for case in found.cases if case.follows} == {
        "recovery_time": "faults", "hang_detected": "faults",
    }  # fmt: skip
    assert "the job ended at step 30; the fault was planned for step 900" in found.reason
