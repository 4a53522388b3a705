"""A job that skips other iterations than its twin, as with a loss scaler that lost its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.completed import Completed
from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.harness.agent.wire import Event, Kind

KILL = [(18, 1)]
SKIPS = (
    "other iterations were skipped (made no optimizer step) than in the twin: in step 18 the LR schedule's counter "
    "went on by 1, and by 2 in the twin"
)


def _edited(record: Any, edit: Callable[[Event, int], dict[str, Any]]) -> Any:
    """The record with these entries in its steps. `edit` is given the event and its global step."""

    def of(event: Event) -> Event:
        step = (event.step or 0) + (15 if event.attempt else 0)
        return replace(event, data={**event.data, **edit(event, step)})

    events = [of(event) if event.kind is Kind.STEP else event for event in record.events]
    return replace(record, events=tuple(events))


def _twin(trainer: Any, seen: bool = True) -> Any:
    """It skipped an iteration between step 17 and 18."""
    return _edited(trainer().record(), lambda event, step: {"sched_step": (step - 1 + (step >= 18)) if seen else None})


def _run(trainer: Any, seen: bool = True, other: bool = True) -> Any:
    """It skipped none, and so consumed in step 18 what the twin consumed in no step."""

    def edit(event: Event, step: int) -> dict[str, Any]:
        late = {"losses": [9.0 + step], "samples": [f"{step:06x}{at:06x}" for at in range(8)], "indices": None}
        return {"sched_step": step - 1 if seen else None, **(late if event.attempt and step >= 18 and other else {})}

    return _edited(trainer(kills=KILL).record(), edit)


@pytest.mark.parametrize("assertion", [LossContinuity(), SampleAccounting()])
def test_other_skipped_iterations_are_the_cause(trainer: Any, assertion: Any) -> None:
    """The samples and the rates of later steps follow from it, and are no cause."""
    reason = assertion.judge(_run(trainer), [_twin(trainer)]).reason
    assert SKIPS in reason
    assert "data order" not in reason
    assert "restored" not in reason
    assert "too often" not in reason


def test_a_job_that_goes_on_too_long_says_so_too(trainer: Any) -> None:
    """One iteration less was skipped, so one step more was made."""
    run = _run(trainer)
    finding = Completed(steps=29).judge(run, [_twin(trainer)])
    assert f"the job went on to step 30, 1 beyond 29: {SKIPS}" in finding.reason


@pytest.mark.parametrize(("seen", "other"), [(False, True), (True, False)], ids=["no counter", "the same samples"])
def test_what_was_not_seen_is_not_said(trainer: Any, seen: bool, other: bool) -> None:
    """Without the schedule's counter nothing shows the iterations; a schedule alone may be wrong by itself."""
    for assertion in (LossContinuity(), SampleAccounting(), Completed(steps=29)):
        assert "skipped (made" not in assertion.judge(_run(trainer, seen, other), [_twin(trainer, seen)]).reason
