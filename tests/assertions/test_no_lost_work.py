"""no_lost_work: a job resumes from the newest complete checkpoint, or it is told what it passed over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchaos.assertions.no_lost_work import NoLostWork
from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import Assertion, Outcome
from torchaos.harness.history import History


def _from(run: Any, base: int) -> Any:
    """The record of a job whose second attempt loaded the checkpoint of step `base` (0: none)."""
    events = []
    for event in run.events:
        if event.kind is Kind.LOAD_END and event.attempt == 1:
            if base:
                path = f"/job/checkpoints/step-{base}"
                events.append(replace(event, data={**event.data, "path": path, "numbers": {"step": base}}))
        elif event.kind is Kind.STEP and event.attempt == 1 and not base:
            counted = {"opt_step": event.step, "sched_step": (event.step or 1) - 1}
            events.append(replace(event, data={**event.data, **counted, "samples": [], "losses": []}))
        else:
            events.append(event)
    return replace(run, events=tuple(events))


def test_a_resume_from_the_newest_checkpoint_passes(trainer: Any) -> None:
    """With one kill and with two, and `steps` bounds what a checkpoint interval costs."""
    assert isinstance(NoLostWork(), Assertion)
    for kills in ([(18, 1)], [(18, 1), (24, 0)]):
        finding = NoLostWork().judge(trainer(kills=kills).record(), [])
        assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.measured["resumes"] == 2
    tight = NoLostWork(steps=2).judge(trainer(kills=[(19, 1)]).record(), [])
    assert (tight.outcome, "3 steps were lost, and 2 are allowed" in tight.reason) == (Outcome.FAILED, True)


def test_an_older_checkpoint_is_told(trainer: Any) -> None:
    """Which one was taken, which one was there, and how many steps that cost."""
    finding = NoLostWork().judge(_from(trainer(kills=[(18, 1)]).record(), 10), [])
    assert finding.outcome is Outcome.FAILED
    assert "went on from step 10, though the checkpoint of step 15 (step-15)" in finding.reason
    assert "its choice of the newest is at fault" in finding.reason
    assert finding.measured["needless"] == 5


def test_a_start_from_scratch_is_told(trainer: Any) -> None:
    """No load at all, and counters that begin anew."""
    finding = NoLostWork().judge(_from(trainer(kills=[(18, 1)]).record(), 0), [])
    assert finding.outcome is Outcome.FAILED
    assert "started from scratch, though the checkpoint of step 15" in finding.reason


def test_a_checkpoint_that_may_not_be_complete_decides_nothing(trainer: Any) -> None:
    """One that was written to its end just before the kill may lack its marker: to pass it over is no proof."""
    run = _from(trainer(kills=[(16, 1)]).record(), 10)
    finding = NoLostWork().judge(run, [])
    assert finding.outcome is Outcome.INCONCLUSIVE
    assert "the checkpoint of step 15 had just been written" in finding.reason


def test_a_save_that_a_rank_never_finished_is_no_checkpoint(trainer: Any) -> None:
    """Step 15 lacks the end of rank 1's part: going back to step 10 loses nothing that could be had."""
    run = _from(trainer(kills=[(18, 1)]).record(), 10)
    events = [
        event for event in run.events
        if not (event.kind is Kind.SAVE_END and (event.rank, event.step, event.attempt) == (1, 15, 0))
    ]  # fmt: skip
    finding = NoLostWork().judge(replace(run, events=tuple(events)), [])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_a_save_in_the_background_is_sure_only_when_the_next_began(trainer: Any) -> None:
    """What a thread writes may not be renamed yet when training goes on: that is inconclusive."""
    run = _from(trainer(kills=[(18, 1)], save_s=0.0).record(), 10)
    late = tuple(
        replace(event, mono_s=event.mono_s + 0.03) if event.kind is Kind.SAVE_END else event for event in run.events
    )
    finding = NoLostWork().judge(replace(run, events=late), [])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


def test_what_is_not_there_or_not_known_is_inconclusive(trainer: Any) -> None:
    """One that came back and made no step, and one of which nobody can say where it went on. One that was never
    restarted has lost nothing."""
    assert NoLostWork().judge(trainer().record(), []).outcome is Outcome.PASSED
    idle = trainer(kills=[(18, 1)]).record()
    gone = tuple(e for e in idle.events if not (e.kind is Kind.STEP and e.attempt == 1))
    assert NoLostWork().judge(replace(idle, events=gone), []).outcome is Outcome.INCONCLUSIVE
    run = trainer(kills=[(18, 1)], loads_seen=False, counters_seen=False, samples_seen=False, losses_seen=False)
    record = run.record()
    assert History.of(record.events).unplaced
    assert NoLostWork().judge(record, []).outcome is Outcome.INCONCLUSIVE
