"""completed: exit code 0 and the right last step; an abort at interpreter exit is recognised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.completed import Completed
from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.restarts import Restarts
from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.harness.analysis.replica_verdict import judged
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Event, Kind

KILL = [(18, 1)]
GOOD = {"path": "step-30", "format": "dcp", "step": 30, "complete": True, "loadable": True, "problem": None}
INVENTORY = {"root": "/job/checkpoints", "checkpoints": [{**GOOD, "tensors": {}, "values": {}, "bytes": 1}]}


def _aborting(trainer: Any, again: bool) -> Any:
    """A job that was done and then aborted on its way out. `again`: torchelastic started it once more, and it trained
    one step beyond its end; otherwise it just ended with exit code 1."""
    run = trainer().record(inventory=INVENTORY)
    events = []
    for event in run.events:
        if event.kind is Kind.RANK_EXITED and event.rank == 1:
            ended = Event(Kind.AGENT_ENDED, "rank1-a0", 9_000, 0.0, event.mono_s - 0.001, 1, 0, None, {"unseen": []})
            events += [ended, replace(event, data={**event.data, "exit_code": -6})]
        elif event.kind is not Kind.JOB_EXITED:
            events.append(event)
    end = events[-1].mono_s
    if again:
        steps = [e for e in events if e.kind is Kind.STEP][-2:]
        for n, step in enumerate(steps):
            source = f"rank{step.rank}-a1"
            up = {"pid": 2000 + n, "start_ticks": 1, "local_rank": n, "world_size": 2, "node": 0}
            load = {"path": "/job/checkpoints/step-30", "format": "dcp", "ok": True, "numbers": {}}
            gone = {"pid": 2000 + n, "start_ticks": 1, "exit_code": 0}
            events += [
                Event(Kind.RANK_UP, source, 0, 0.0, end + 1, step.rank, 1, None, up),
                Event(Kind.LOAD_END, source, 1, 0.0, end + 2, step.rank, 1, 0, load),
                replace(
                    step, source=source, seq=2, mono_s=end + 3, attempt=1, step=1, data={**step.data, "opt_step": 31}
                ),
                Event(Kind.RANK_EXITED, source, 3, 0.0, end + 4, step.rank, 1, None, gone),
            ]
    code = {"submission": 0, "pid": 50, "exit_code": 0 if again else 1}
    return replace(run, events=(*events, Event(Kind.JOB_EXITED, "harness", 9_999, 0.0, end + 5, data=code)))


def test_a_job_that_ended_as_its_twin_is_completed(trainer: Any) -> None:
    """Exit code 0 after the twin's last step, or after the one that was given."""
    assert isinstance(Completed(), Assertion)
    run, twin = trainer(kills=KILL).record(), trainer().record()
    assert Completed().judge(run, [twin]).outcome is Outcome.PASSED
    assert Completed(steps=30).judge(run, []).outcome is Outcome.PASSED
    alone = Completed().judge(run, [])
    assert (alone.outcome, "nothing shows that this is the last step" in alone.reason) == (Outcome.INCONCLUSIVE, True)


@pytest.mark.parametrize(("due", "words"), [(35, "5 short of 35"), (25, "5 beyond 25")])
def test_another_last_step_fails(trainer: Any, due: int, words: str) -> None:
    """Exit code 0 is not enough: the job must have done its steps, and no more."""
    finding = Completed(steps=due).judge(trainer(kills=KILL).record(), [])
    assert (finding.outcome, words in finding.reason) == (Outcome.FAILED, True)


def test_an_exit_code_fails_with_its_cause(trainer: Any) -> None:
    """A job that ended with an error is not completed; one that had to be stopped neither."""
    run = trainer(kills=KILL).record()
    *events, end = run.events
    bad = replace(end, data={"submission": 0, "pid": 50, "exit_code": 1})
    cause = Event(Kind.LOG_CAUSE, "harness", 9_000, 0.0, end.mono_s - 1, data={"cause": "no space left", "line": ""})
    finding = Completed().judge(replace(run, events=(*events, cause, bad)), [])
    assert (finding.outcome, finding.reason) == (Outcome.FAILED, "the job ended with exit code 1: no space left")
    stop = Event(Kind.STOPPED, "harness", 9_001, 0.0, end.mono_s - 0.1, data={"reason": "it took too long"})
    assert "it took too long" in Completed().judge(replace(run, events=(*events, stop, end)), []).reason
    assert Completed().judge(replace(run, events=tuple(events)), []).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    ("waited_s", "outcome", "words"),
    [(1.0, Outcome.INCONCLUSIVE, "nobody waited for its exit"), (60.0, Outcome.FAILED, "the job never exited")],
)
def test_a_job_that_was_ended_just_after_its_last_step(
    trainer: Any, waited_s: float, outcome: Outcome, words: str
) -> None:
    """Its time was over as it was done, on a slow machine: it might have ended by itself. After a minute it did not."""
    run, twin = trainer(kills=KILL).record(), trainer().record()
    last_s = run.history.executions.last_s()
    stop = Event(Kind.STOPPED, "harness", 9_001, 0.0, last_s + waited_s, data={"reason": "the time-out of 90 s"})
    events = tuple(event for event in run.events if event.mono_s <= last_s)
    finding = Completed().judge(replace(run, events=(*events, stop)), [twin])
    assert (finding.outcome, words in finding.reason) == (outcome, True), finding.reason


def test_an_abort_on_the_way_out_is_set_aside(trainer: Any) -> None:
    """A done job that torchelastic ran once more is completed, and the step beyond is left out everywhere."""
    run, twin = _aborting(trainer, again=True), trainer().record(inventory=INVENTORY)
    finding = Completed().judge(run, [twin])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "rank 1 aborted at interpreter exit, after its last step (30)" in finding.reason
    assert finding.measured["teardown_aborts"] == 1
    for assertion in (LossContinuity(), SampleAccounting(), Restarts(max=0)):
        judged = assertion.judge(run, [twin])
        assert judged.outcome is Outcome.PASSED, judged.reason
    assert LossContinuity().judge(trainer(kills=KILL).record(), [run]).outcome is Outcome.PASSED


def test_an_abort_with_an_error_needs_a_verified_checkpoint(trainer: Any) -> None:
    """With no restart left the job ends with 1; that is set aside only when its final checkpoint is whole."""
    run, twin = _aborting(trainer, again=False), trainer().record()
    assert Completed().judge(run, [twin]).outcome is Outcome.PASSED
    unverified = Completed().judge(replace(run, artifacts={}), [twin])
    assert (unverified.outcome, "could not be verified" in unverified.reason) == (Outcome.FAILED, True)


def test_an_abort_in_the_middle_is_none_on_the_way_out(trainer: Any) -> None:
    """The same exit code before the last step is a crash like any other."""
    finding = Completed(steps=35).judge(_aborting(trainer, again=False), [])
    assert (finding.outcome, finding.reason) == (Outcome.FAILED, "the job ended with exit code 1")


def test_steps_that_were_not_seen_are_inconclusive(trainer: Any) -> None:
    """Exit code 0 of a job whose steps nobody saw shows nothing about its last one."""
    run = trainer().record()
    blind = replace(run, events=tuple(e for e in run.events if e.kind is not Kind.STEP))
    finding = Completed(steps=30).judge(blind, [])
    assert (finding.outcome, "no step was seen" in finding.reason) == (Outcome.INCONCLUSIVE, True)


def _behind_a_pipe(run: Any, code: int, *more: Event, teardown: bool = False) -> Any:
    """Rank 1 of the last attempt ended with this code, and the command with 0 all the same."""
    events = []
    for event in run.events:
        if event.kind is Kind.RANK_EXITED and event.rank == 1:
            if teardown:
                signal = {"pid": event.data["pid"], "signal": "SIGTERM"}
                events.append(Event(Kind.ELASTIC_TEARDOWN, "harness", 9_000, 0.0, event.mono_s, data=signal))
            event = replace(event, data={**event.data, "exit_code": code})
        events.append(event)
    return replace(run, events=tuple(sorted((*events, *more), key=lambda e: e.mono_s)))


@pytest.mark.parametrize("code", [1, -11])
def test_a_rank_that_failed_counts_whatever_the_command_says(trainer: Any, code: int) -> None:
    """`torchrun … | tee log` ends with the exit code of tee; torchelastic told of the rank that failed."""
    run, twin = trainer().record(), trainer().record()
    gone = next(e for e in run.events if e.kind is Kind.RANK_EXITED and e.rank == 1)
    told = {"exit_code": code, "local_rank": 1, "pid": gone.data["pid"]}
    failure = Event(Kind.ELASTIC_FAILURE, "harness", 9_001, 0.0, gone.mono_s + 0.01, data=told)
    finding = Completed().judge(_behind_a_pipe(run, code, failure), [twin])
    assert finding.outcome is Outcome.FAILED
    assert f"rank 1 ended with exit code {code} in the last attempt, though the command's own" in finding.reason
    unheard = Completed().judge(_behind_a_pipe(run, code), [twin])
    assert unheard.outcome is Outcome.FAILED, "torchelastic's words may be lost in the pipe"
    assert Completed().judge(run, [twin]).outcome is Outcome.PASSED


def test_a_rank_that_was_ended_or_restarted_did_not_fail_in_the_end(trainer: Any) -> None:
    """A rank that torchelastic told to go, one that somebody did, and a death in an earlier attempt."""
    run, twin = trainer().record(), trainer().record()
    assert Completed().judge(_behind_a_pipe(run, 143, teardown=True), [twin]).outcome is Outcome.PASSED
    assert Completed().judge(_behind_a_pipe(run, -15), [twin]).outcome is Outcome.PASSED
    assert Completed().judge(trainer(kills=KILL).record(), [twin]).outcome is Outcome.PASSED


def test_an_abort_behind_a_pipe_is_as_one_without(trainer: Any) -> None:
    """Set aside where the last checkpoint is whole; else a failure, though the command ended with 0."""
    run, twin = _aborting(trainer, again=False), trainer().record()
    end = replace(run.events[-1], data={**run.events[-1].data, "exit_code": 0})
    piped = replace(run, events=(*run.events[:-1], end))
    assert Completed().judge(piped, [twin]).outcome is Outcome.PASSED
    unverified = Completed().judge(replace(piped, artifacts={}), [twin])
    assert (unverified.outcome, "could not be verified" in unverified.reason) == (Outcome.FAILED, True)


@pytest.mark.parametrize("seen", [True, False])
def test_steps_that_the_agent_could_not_count(trainer: Any, seen: bool) -> None:
    """A twin without a step does not show which step is the last: the words are the agent's own. That no rank
    was found is said only if there was none."""
    said = "the agent saw 30 backward passes and no optimizer step: the reason"
    hidden = {Kind.STEP, Kind.NOTE}
    run, twin = (
        replace(record, events=tuple(e for e in record.events if e.kind not in hidden and (seen or e.rank is None)))
        for record in (trainer(kills=KILL).record(), trainer().record())
    )
    note = Event(Kind.NOTE, "rank0-a0", 9_000, 0.0, run.events[-1].mono_s, 0, 0, 0, {"text": said, "unseen": "steps"})
    run, twin = (replace(each, events=(*each.events, note) if seen else each.events) for each in (run, twin))
    found = Completed().judge(run, [twin])
    assert found.outcome is Outcome.INCONCLUSIVE
    words = (
        said if seen else "no rank was found; a process is a rank if it has RANK, LOCAL_RANK and TORCHELASTIC_RUN_ID"
    )
    assert found.reason.startswith(f"exit code 0, and no step of the twin was seen: {words}")
    assert words in judged(SampleAccounting(), run, [twin]).reason


@pytest.mark.parametrize(
    ("ours", "outcome", "says"),
    [
        (["out/evaluation-5.json", "out/evaluation-10.json"], Outcome.PASSED, "the last one"),
        (["out/evaluation-5.json"], Outcome.FAILED, "out/evaluation-10.json is missing, which the twin has"),
        (None, Outcome.INCONCLUSIVE, "were not listed"),
    ],
)
def test_a_result_that_only_the_twin_wrote_is_missing(
    trainer: Any, ours: list[str] | None, outcome: Outcome, says: str
) -> None:
    """An evaluation that a resumed job never did leaves no other sign. Other files may differ."""
    theirs = ["out/evaluation-10.json", "out/evaluation-5.json", "out/log"]
    run, twin = (
        replace(one, artifacts={**one.artifacts, **({"files": files} if files is not None else {})})
        for one, files in ((trainer(kills=[(18, 1)]).record(), ours), (trainer().record(), theirs))
    )
    finding = Completed(outputs=("out/evaluation-*.json",)).judge(run, [twin])
    assert (finding.outcome, says in finding.reason) == (outcome, True), finding.reason
    none = Completed(outputs=("results/*",)).judge(run, [twin])
    assert none.outcome is Outcome.INCONCLUSIVE
