"""restarts: how many there were, of which ranks and why; and a job that gives up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from torchaos.assertions.restarts import Restarts
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Event, Kind

KILL = [(18, 1)]


def _dying(trainer: Any, exit_code: int | None = 1, stopped: bool = False) -> Any:
    """A job that was killed once, crashed twice, and then ended with this exit code (None: never)."""
    run = trainer(kills=[(18, 1), (18, 1), (18, 1)]).record()
    events = [e for e in run.events if e.attempt != 3 and e.kind is not Kind.JOB_EXITED]
    events = [e for e in events if e.kind is not Kind.APPLYING or e.attempt == 0]
    end = events[-1].mono_s
    if stopped:
        events.append(Event(Kind.STOPPED, "harness", 9_998, 0.0, end + 1, data={"reason": "time-out"}))
    if exit_code is not None:
        data = {"submission": 0, "pid": 50, "exit_code": exit_code}
        events.append(Event(Kind.JOB_EXITED, "harness", 9_999, 0.0, end + 2, data=data))
    return replace(run, events=tuple(events))


def test_one_restart_per_fault_is_the_default(trainer: Any) -> None:
    """A kill may cost one restart; a restart that no fault accounts for fails."""
    assert isinstance(Restarts(), Assertion)
    finding = Restarts().judge(trainer(kills=KILL).record(), [])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.reason == ("the job was restarted once, by torchelastic: rank 1 was killed by signal 9 in attempt 0")
    assert (finding.measured["restarts"], finding.bound["max"]) == (1, 1)
    assert Restarts().judge(_dying(trainer), []).outcome is Outcome.FAILED


def test_bounds_on_the_number(trainer: Any) -> None:
    """More than max and fewer than min fail."""
    run = trainer(kills=KILL).record()
    assert Restarts(max=0).judge(run, []).outcome is Outcome.FAILED
    assert Restarts(min=2).judge(run, []).outcome is Outcome.FAILED
    assert Restarts(max=1, min=1).judge(run, []).outcome is Outcome.PASSED


def test_torchelastic_and_resubmission_are_told_apart(trainer: Any) -> None:
    """Who started the attempt can be demanded."""
    inside, outside = trainer(kills=KILL).record(), trainer(kills=KILL, resubmitted=True).record()
    assert Restarts(who="torchelastic").judge(inside, []).outcome is Outcome.PASSED
    assert Restarts(who="resubmission").judge(outside, []).outcome is Outcome.PASSED
    finding = Restarts(who="torchelastic").judge(outside, [])
    assert (finding.outcome, "started by resubmission" in finding.reason) == (Outcome.FAILED, True)


def test_the_cause_in_the_log_is_named(trainer: Any) -> None:
    """What the log says of the end goes into the reason."""
    run = trainer(kills=KILL).record()
    hit = next(e for e in run.events if e.kind is Kind.APPLYING)
    cause = Event(
        Kind.LOG_CAUSE, "harness", 9_999, 0.0, hit.mono_s + 0.1, data={"cause": "gloo lost its peer", "line": ""}
    )
    finding = Restarts().judge(replace(run, events=(*run.events, cause)), [])
    assert finding.reason.endswith("(gloo lost its peer)")


def test_giving_up_in_time(trainer: Any) -> None:
    """A job that can't recover ends with an error within the bound, instead of looping, hanging or claiming success."""
    bound = TypeAdapter(Restarts).validate_python({"gives_up_within": "1m"})
    assert bound == Restarts(gives_up_within=60.0)
    assert bound.judge(_dying(trainer), []).outcome is Outcome.PASSED
    assert "too late" in Restarts(gives_up_within=1.0).judge(_dying(trainer), []).reason
    assert "exit code 0" in bound.judge(_dying(trainer, exit_code=0), []).reason
    for looping in (_dying(trainer, exit_code=None), _dying(trainer, exit_code=-9, stopped=True)):
        finding = bound.judge(looping, [])
        assert (finding.outcome, "never gave up" in finding.reason) == (Outcome.FAILED, True)


FAILED = "E1127 10:00:00.000000 41 api.py:984] failed (exitcode: 1) local_rank: 1 (pid: 7) of binary: python"
LOG = ("Traceback (most recent call last):", "ValueError: sample 17 is not a number", FAILED)


@pytest.mark.parametrize(
    ("log", "outcome"),
    [
        ((*LOG, *LOG), Outcome.PASSED),
        ((*LOG, *LOG, "supervisor: gives up, sample 17 is bad"), Outcome.PASSED),
        ((*LOG, "RuntimeError: address already in use", FAILED), Outcome.FAILED),  # the reason of an earlier attempt
        ((*LOG, FAILED), Outcome.FAILED),
        ((), Outcome.INCONCLUSIVE),
    ],
)
def test_a_job_that_gives_up_says_why(trainer: Any, log: tuple[str, ...], outcome: Outcome) -> None:
    """The line is one of the last attempt, or comes after it. torchelastic's own lines are nobody's reason."""
    run = replace(_dying(trainer), log_end=log)
    finding = Restarts(gives_up_within=60.0, pattern="sample [0-9]+").judge(run, [])
    assert finding.outcome is outcome, finding.reason
    assert ("sample 17" in finding.reason) == (outcome is Outcome.PASSED)
    assert Restarts(gives_up_within=60.0, pattern="exitcode: 1").judge(run, []).outcome is not Outcome.PASSED


def test_each_node_reports_the_failure_of_an_attempt(trainer: Any) -> None:
    """The reason stands before the line of one node, and the line of another node follows."""
    run = _dying(trainer)
    two = replace(run, plan=replace(run.plan, job=replace(run.plan.job, nodes=2)), log_end=(*LOG, FAILED))
    assert Restarts(gives_up_within=60.0, pattern="sample 17").judge(two, []).outcome is Outcome.PASSED


def test_a_pattern_is_for_a_job_that_gives_up() -> None:
    """Elsewhere it would be read by nobody."""
    with pytest.raises(ValidationError, match="write gives_up_within, too"):
        TypeAdapter(Restarts).validate_python({"pattern": "bad"})


def test_only_a_job_that_must_give_up_need_not_recover() -> None:
    """The gate on going further than before is dropped for it, and for it alone."""
    assert Restarts().expects_recovery
    assert not Restarts(gives_up_within=60.0).expects_recovery


def test_nothing_seen_is_inconclusive(trainer: Any) -> None:
    """Without any attempt there is nothing to count."""
    run = trainer().record()
    assert Restarts().judge(replace(run, events=()), []).outcome is Outcome.INCONCLUSIVE


def test_another_torchrun_of_the_same_command(trainer: Any) -> None:
    """A script that starts torchrun again has restarted its ranks itself; torchelastic has not."""
    run = trainer(kills=KILL).record()
    up_s = next(e.mono_s for e in run.events if e.attempt == 1)
    begins = [
        Event(Kind.TORCHRUN, f"torchrun-a{n}", 0, 0.0, at_s, None, n, data={"pid": 7, "start_ticks": 1, "ended": False})
        for n, at_s in ((0, 1.0), (1, up_s - 0.01))
    ]
    again = replace(run, events=tuple(sorted((*run.events, *begins), key=lambda e: e.mono_s)))
    finding = Restarts(who="command").judge(again, [])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.reason.startswith("the job was restarted once, by another torchrun of its command: rank 1")
    assert Restarts(who="torchelastic").judge(again, []).outcome is Outcome.FAILED
    only = replace(run, events=tuple(sorted((*run.events, begins[0]), key=lambda e: e.mono_s)))
    assert Restarts(who="torchelastic").judge(only, []).outcome is Outcome.PASSED


def test_torchelastic_is_named_only_where_it_was_seen(trainer: Any) -> None:
    """Another launcher may start the ranks again: without a report of torchelastic, nobody is named."""
    elastic = {kind for kind in Kind if kind.value.startswith("elastic.")}
    seen = trainer(kills=KILL).record()
    run = replace(seen, events=tuple(event for event in seen.events if event.kind not in elastic))
    finding = Restarts().judge(run, [])
    assert finding.outcome is Outcome.PASSED
    assert finding.reason == "the job was restarted once: rank 1 was killed by signal 9 in attempt 0"
    assert Restarts(who="torchelastic").judge(run, []).outcome is Outcome.INCONCLUSIVE
    assert Restarts(who="command").judge(run, []).outcome is Outcome.INCONCLUSIVE
    finding = Restarts(who="resubmission").judge(run, [])
    assert (finding.outcome, "in the same submission" in finding.reason) == (Outcome.FAILED, True)
    attached = replace(run, plan=replace(run.plan, job=replace(run.plan.job, attach_pid=50)))
    assert Restarts(who="torchelastic").judge(attached, []).outcome is Outcome.PASSED


def test_where_no_rank_was_found_restarts_are_not_known(trainer: Any) -> None:
    """A job whose log alone was seen may have been restarted by its launcher; that it gave up is still seen."""
    seen = trainer(log_only=1).record()
    of_ranks = (Kind.RANK_UP, Kind.RANK_EXITED)
    run = replace(seen, events=tuple(event for event in seen.events if event.kind not in of_ranks))
    finding = Restarts().judge(run, [])
    assert finding.outcome is Outcome.INCONCLUSIVE
    assert finding.reason.startswith("no rank was found; a process is a rank if it has RANK, LOCAL_RANK and TORCHEL")
    assert "exit code 0" in Restarts(gives_up_within=60.0).judge(run, []).reason
