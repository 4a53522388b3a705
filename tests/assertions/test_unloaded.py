"""A job that could not load a checkpoint: the reason names the file, and what was tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchaos.assertions.no_lost_work import NoLostWork
from torchaos.harness.analysis.ending import not_resumed
from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import Named
from torchaos.harness.record.record import Record
from torchaos.harness.reporting.event_timeline import happened
from torchaos.harness.reporting.terminal.console import why

TORN = {"path": "step-15", "format": "dcp", "step": 15, "complete": False, "loadable": False, "tensors": {},
        "values": {}, "problem": "step-15: __1_0.distcp is cut off", "problems": []}  # fmt: skip


def _refused(run: Record, *, steps: bool, later: str = "") -> Record:
    """The second attempt can't load the checkpoint, and either makes no step or begins anew. `later`: a checkpoint that
    it loads after that."""
    events: list[Event] = []
    for event in run.events:
        if event.attempt == 1 and event.kind in (Kind.STEP, Kind.SAVE_BEGIN, Kind.SAVE_END) and not steps:
            continue
        if event.attempt == 1 and event.kind is Kind.LOAD_END:
            events.append(replace(event, data={**event.data, "ok": False, "numbers": {}}))
            if later:
                data = {**event.data, "path": f"/job/checkpoints/{later}", "numbers": {"step": 10}}
                events.append(replace(event, data=data, seq=event.seq + 10_000))
        elif event.kind is Kind.JOB_EXITED and not steps:
            events.append(replace(event, data={**event.data, "exit_code": 1}))
        else:
            events.append(event)
    return replace(run, events=tuple(events))


def test_the_headline_names_the_file_that_kept_the_job_from_resuming(trainer: Any) -> None:
    """With what the inventory found in it, in the first sentence; and not if the job made a step, or loaded another
    checkpoint after it."""
    inventory = {"root": "/job/checkpoints", "checkpoints": [TORN]}
    run = trainer(kills=[(18, 1)]).record(inventory=inventory)
    bad = _refused(run, steps=False)
    words = "attempt 1 could not load step-15 (step-15: __1_0.distcp is cut off)"
    assert not_resumed(bad) == words
    result = verdict_of(replace(bad, plan=replace(bad.plan, asserts=(Named("completed", {"steps": 30}),))), [], "")
    assert why(result).lead.startswith(words[:1].upper() + words[1:]), result.reason
    one_rank = [
        replace(event, data={**event.data, "ok": True}) if event.kind is Kind.LOAD_END and event.rank == 1 else event
        for event in bad.events
    ]
    assert not_resumed(replace(bad, events=tuple(one_rank))) == words
    assert not not_resumed(_refused(run, steps=True))
    assert not not_resumed(_refused(run, steps=False, later="step-10"))


def test_a_file_that_is_missing_is_not_said_to_be_unloadable(trainer: Any) -> None:
    """The attempt looked for it, and ended without a step."""
    bad = _refused(trainer(kills=[(18, 1)]).record(), steps=False)
    gone = [
        replace(event, data={**event.data, "missing": True}) if event.kind is Kind.LOAD_END and event.attempt else event
        for event in bad.events
    ]
    assert not_resumed(replace(bad, events=tuple(gone))) == "attempt 1 looked for step-15, which did not exist"


def test_the_story_tells_what_the_job_removed(trainer: Any) -> None:
    """Once for all files of a checkpoint."""
    run = trainer(kills=[(18, 1)]).record()
    last = [event for event in run.events if event.kind is Kind.SAVE_END and event.attempt == 1][-1]
    names = ["step-5/a", "step-5/b", "step-10", "step-15"]
    gone = [
        replace(
            last,
            kind=Kind.REMOVED,
            seq=9_000 + at,
            mono_s=last.mono_s + 1e-5 * at,
            data={"path": f"/job/checkpoints/{name}"},
        )
        for at, name in enumerate(names, 1)
    ]
    run = replace(run, events=tuple(sorted((*run.events, *gone), key=lambda event: event.mono_s)))
    told = [moment.text for moment in happened(run) if "removes" in moment.text]
    assert told == [f"attempt 1 removes step-{step}" for step in (5, 10, 15)]


def test_a_load_that_failed_is_not_called_unseen(trainer: Any) -> None:
    """The job could not load the newest checkpoint and began anew, or went on from an older one: no_lost_work and the
    story say what it tried."""
    scratch = _from_scratch(trainer(kills=[(18, 1)], loads_seen=True).record())
    finding = NoLostWork().judge(scratch, [])
    assert finding.outcome is Outcome.FAILED
    assert "It tried to load step-15, and that failed." in finding.reason
    assert "No load" not in finding.reason
    (line,) = [moment.text for moment in happened(scratch) if moment.text.startswith("attempt 1 begins")]
    assert "could not load step-15" in line


def test_a_file_that_was_looked_for_and_does_not_exist(trainer: Any) -> None:
    """All ranks looked for it before the first step: the story says so once, and does not call it a load that failed,
    nor does no_lost_work."""
    run = trainer(kills=[(18, 1)], loads_seen=True).record()
    data = {"path": "/job/A", "format": "torch", "ok": False, "numbers": {}, "missing": True}
    for attempt in (0, 1):
        first = [one for one in run.events if one.kind is Kind.STEP and (one.attempt, one.step) == (attempt, 1)]
        begun_s = min(step.mono_s for step in first) - 0.001
        looked = (replace(one, kind=Kind.LOAD_END, step=0, mono_s=begun_s, seq=9_000, data=data) for one in first)
        run = replace(run, events=tuple(sorted((*run.events, *looked), key=lambda event: event.mono_s)))
    story = [moment.text for moment in happened(run)]
    assert [line for line in story if line.endswith("looked for A, which does not exist")] == [
        "attempt 0: looked for A, which does not exist", "attempt 1: looked for A, which does not exist"
    ]  # fmt: skip
    assert not any("could not load" in line for line in story), story
    assert "attempt 0 begins with step 1" in story


def test_a_checkpoint_that_did_not_exist_was_not_passed_over(trainer: Any) -> None:
    """The second attempt looked for a file that did not exist, and began anew: the reason says so."""
    run = _from_scratch(trainer(kills=[(18, 1)], loads_seen=True).record())
    for path, says in (
        ("/job/checkpoints/step-15", "had been complete, but rank 0 of attempt 1 looked for it, and it did not exist"),
        ("/job/checkpoints/last.pt", "It looked for last.pt, which did not exist."),
    ):
        events = (
            replace(event, data={**event.data, "path": path, "missing": True})
            if event.kind is Kind.LOAD_END and event.attempt == 1 else event
            for event in run.events
        )  # fmt: skip
        finding = NoLostWork().judge(replace(run, events=tuple(events)), [])
        assert (finding.outcome, says in finding.reason) == (Outcome.FAILED, True), finding.reason


def _from_scratch(run: Record) -> Record:
    """The second attempt can't load its checkpoint, and makes the first steps again."""
    made = {
        (event.step, event.rank): event.data for event in run.events if event.kind is Kind.STEP and not event.attempt
    }
    events = [
        replace(event, data=made.get((event.step, event.rank), event.data))
        if event.kind is Kind.STEP and event.attempt == 1 else event
        for event in _refused(run, steps=True).events
    ]  # fmt: skip
    return replace(run, events=tuple(events))
