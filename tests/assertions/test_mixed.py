"""A job in which two processes made steps as the same rank of the same attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.judging.verdict.verdict import verdict_of
from torchaos.harness.record.plan import Named
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
