"""A job that ends well, but in another step than its twin: one assertion finds it, and the others follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.plan import Named
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Result, Verdict

KILL = [(18, 1)]
ALL = ("checkpoint_integrity", "loss_continuity", "parameter_digest", "sample_accounting", "completed", "lr_continuity")
WHY = (
    "The losses agree in the {} steps that both made: most likely, state that was not restored decides when the job "
    "stops, such as a count of steps, or of bad validations."
)


def _inventory(last: int, every: int = 5) -> dict[str, Any]:
    return {"root": "/job/checkpoints", "checkpoints": [
        {"path": f"step-{step}", "format": "dcp", "step": step, "complete": True, "loadable": True, "problem": None,
         "tensors": {"weight": f"w{step}"}, "values": {"bad": str(step)}, "bytes": 10}
        for step in range(every, last + 1, every)
    ]}  # fmt: skip


def _judged(run: Record, twins: Sequence[Record], asserts: Sequence[str] = ALL) -> Result:
    plan = replace(run.plan, asserts=tuple(Named(name, {}) for name in asserts))
    return verdict_of(replace(run, plan=plan), twins, "/run")


@pytest.fixture
def stops(trainer: Any) -> Any:
    """The record of a job that stops after a step."""

    def record(step: int, **how: Any) -> Record:
        artifacts = {"inventory": how.pop("inventory", _inventory(step))}
        made: Record = trainer(stops=step, state_seen=True, **how).record(**artifacts)
        return made

    return record


@pytest.mark.parametrize(("ours", "twins", "words"), [(30, 24, "6 beyond 24"), (24, 30, "6 short of 30")])
def test_one_finding_leads_in_both_directions(stops: Any, ours: int, twins: int, words: str) -> None:
    """All steps that both made are equal. Newer checkpoints, more samples and other parameters at the end follow."""
    result = _judged(stops(ours, kills=KILL), [stops(twins)])
    follows = {case.name: case.follows for case in result.cases if case.verdict is Verdict.FAILED}
    assert result.decided_by == "completed"
    assert follows == {name: None if name == "completed" else "completed" for name in ALL[:5]}
    assert words in result.reason
    assert WHY.format(24) in result.reason
    cause = next(case.cause for case in result.cases if case.name == "completed")
    assert cause == "state that was not restored decides when the job stops, such as a count of steps, or of bad " + (
        "validations"
    )


def test_no_assertion_speaks_of_an_end_that_both_made(stops: Any) -> None:
    """Equal parameters and rates are of the steps that both made, and the samples of the others are counted."""
    reasons = {case.name: case.reason for case in _judged(stops(30, kills=KILL), [stops(24)]).cases}
    assert reasons["lr_continuity"] == "the learning rates of the 24 steps that both made are the twin's"
    assert "the twin's after the 24 steps that both made, at 4 checkpoints; but" in reasons["parameter_digest"]
    assert "the job ended with step 30, and the twin with step 24" in reasons["parameter_digest"]
    assert reasons["sample_accounting"] == (
        "the job's last step is 30, and the twin's 24: 6 steps (25 to 30) consumed 48 samples"
    )
    assert reasons["checkpoint_integrity"].startswith(
        "the job's last step is 30, and the twin's 24: the newest checkpoint is of step 30, the twin's of step 20. "
    )
    reasons = {case.name: case.reason for case in _judged(stops(24, kills=KILL), [stops(30)]).cases}
    assert "6 steps (25 to 30) consumed 48 samples in the twin, and never took place" in reasons["sample_accounting"]
    assert "there are no learning rates of the steps between" in reasons["lr_continuity"]


@pytest.mark.parametrize("leads", ALL[:4])
def test_each_assertion_leads_alone(stops: Any, leads: str) -> None:
    """Without `completed`, the first of the scenario says how the job ended."""
    result = _judged(stops(30, kills=KILL), [stops(24)], (leads, *(name for name in ALL[:4] if name != leads)))
    assert {case.follows for case in result.cases if case.verdict is Verdict.FAILED} == {None, leads}
    assert result.decided_by == leads
    assert "step 24" in result.reason or "the twin's 24" in result.reason


def test_what_differed_before_is_the_cause_of_the_end(stops: Any) -> None:
    """Parameters or a loss that differ may decide when a job stops, and so may a counter in a checkpoint: they lead."""
    result = _judged(stops(30, kills=KILL, broken=frozenset({"optimizer"})), [stops(24)])
    assert {case.name: case.follows for case in result.cases}["completed"] == "parameter_digest"
    assert "state that was not restored decides" not in result.reason
    wrong = _inventory(30)
    wrong["checkpoints"][3]["values"] = {"bad": "0"}
    result = _judged(stops(30, kills=KILL, inventory=wrong), [stops(24)])
    assert result.reason.startswith("checkpoint_integrity: the value bad in step-20 (step 20) differs from the twin's")
    assert {case.name: case.follows for case in result.cases}["completed"] == "checkpoint_integrity"


def test_without_a_resume_nothing_is_said_of_state(stops: Any) -> None:
    """A job that a fault ended early, as one that takes a signal for its end, lost no state; nor one that was hit
    after it had resumed."""
    run = stops(30, kills=KILL)
    hit = next(event for event in run.events if event.kind is Kind.APPLYING)
    late = max(event.mono_s for event in run.events if event.kind is Kind.STEP)
    again = replace(hit, seq=9_000, mono_s=late - 0.05, attempt=1, rank=0, step=14, source="rank0-a1")
    twice = replace(run, events=tuple(sorted([*run.events, again], key=lambda event: event.mono_s)))
    for one in (stops(30), twice):
        result = _judged(one, [stops(24)], ("completed", "loss_continuity"))
        assert result.reason.startswith("completed: the job went on to step 30, 6 beyond 24")
        assert "most likely" not in result.reason


def test_twins_that_end_in_different_steps_decide_nothing(stops: Any) -> None:
    """A job whose own twins stop by chance may do so, too. A job that ended with an error may not."""
    twins = [stops(24, noise=0.1), stops(30, noise=0.2)]
    result = _judged(stops(26, kills=KILL, noise=0.3), twins)
    assert result.verdict is Verdict.INCONCLUSIVE, result.reason
    assert "the twins ended in different steps, too (24 and 30)" in result.reason
    run = stops(26, kills=KILL, noise=0.3)
    *events, end = run.events
    died = replace(run, events=(*events, replace(end, data={**end.data, "exit_code": 1})))
    assert _judged(died, twins).verdict is Verdict.FAILED


def test_an_end_with_an_error_is_no_other_last_step(stops: Any) -> None:
    """The steps that are missing follow from the error, whatever differed before."""
    run = stops(24, kills=KILL)
    *events, end = run.events
    died = replace(run, events=(*events, replace(end, data={**end.data, "exit_code": 1})))
    result = _judged(died, [stops(30)])
    assert result.reason.startswith("completed: the job ended with exit code 1")
    assert {case.follows for case in result.cases if case.verdict is Verdict.FAILED} == {None, "completed"}
