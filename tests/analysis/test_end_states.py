"""What the state at the end of a job shows about differences from its twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import worlds

from torchaos.harness.analysis.comparison.end_states import against_the_end
from torchaos.harness.analysis.replica_verdict import judged
from torchaos.harness.interfaces import First, Outcome, What, failed
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record

_HEALTHY = replace(worlds.planted(3, "stale weights"), defect="")


def _pair(world: worlds.World) -> tuple[Record, list[Record]]:
    """The records of a job and of its twin."""
    run, twin = (Record(worlds.PLAN, tuple(worlds.Trainer(each).run().events), {}) for each in (world, world.straight))
    return run, [twin]


def _miscounted(run: Record) -> Record:
    """The run as if the second step of its last attempt were taken for another one: with another result."""
    other = {"parameters": "f" * 32}
    return replace(run, events=tuple(
        replace(event, data={**event.data, **other})
        if event.kind is Kind.STEP and (event.attempt, event.step) == (1, 2) else event for event in run.events
    ))  # fmt: skip


@pytest.mark.parametrize("what", [What.PARAMETERS, What.SAMPLES, What.LOSS, What.RATE])
def test_a_difference_that_can_not_have_been_is_no_failure(what: What) -> None:
    """A job that ended with the twin's state made the twin's updates."""
    run, twins = _pair(_HEALTHY)
    step = (run.history.attempts[1].base or 0) + 2
    found = against_the_end(failed("x", First(what, step)), _miscounted(run), twins)
    assert found.outcome is Outcome.PASSED
    assert "the job's last save has the twin's state, bit for bit (parameters" in found.reason
    assert f"the difference in step {step} ({what.value}) did not change the training" in found.reason


@pytest.mark.parametrize("first", [
    First(What.LOSS, 14), First(What.RATE, 14), First(What.LOSS, 99), First(What.REPLICAS, 14), First(What.SAVED, 14),
    None,
])  # fmt: skip
def test_a_difference_that_may_have_been_stays(first: First | None) -> None:
    """A loss may differ in a step that had the twin's result, or whose result was not recorded; ranks may differ for a
    while; files are no state."""
    finding = failed("x", first)
    assert against_the_end(finding, *_pair(_HEALTHY)) is finding


def test_another_last_step_may_be_a_matter_of_counting() -> None:
    """The job ended with the twin's state, so whether it made another number of steps is not known."""
    found = against_the_end(failed("the job ended in step 23", First(What.LAST, 23)), *_pair(_HEALTHY))
    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.reason.startswith("the job ended in step 23. But the job's last save has the twin's state")


@pytest.mark.parametrize("world", [
    replace(_HEALTHY, state="none"),  # no state was recorded
    replace(_HEALTHY, every=99),  # the job never saved
    replace(_HEALTHY, twin=False),
], ids=["unseen", "unsaved", "alone"])  # fmt: skip
def test_nothing_is_taken_back_without_the_state_at_the_end(world: worlds.World) -> None:
    """The state of the last save, and the parameters after the last step, must have been recorded in both runs."""
    run, twins = _pair(world)
    finding = failed("x", First(What.PARAMETERS, 14))
    assert against_the_end(finding, run, twins if world.twin else []) is finding


@pytest.mark.parametrize("defect", [
    "a bit of a weight", "older buffer", "one moment lost", "schedule ahead", "other rate", "RNG of rank 1",
    "data skipped", "data of other ranks", "loss scale", "takes an older checkpoint",
])  # fmt: skip
def test_no_defect_is_taken_back(defect: str) -> None:
    """Whatever a resume loses: what the assertions say of it stays."""
    run, twins = _pair(worlds.planted(5, defect))
    findings = [judged(each, run, twins) for each in worlds.ASSERTIONS]
    assert all(against_the_end(finding, run, twins) is finding for finding in findings)
