"""checkpoint_overhead: the cost of saves, compared with arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.checkpoint_overhead import CheckpointOverhead, writing_s
from torchaos.harness.analysis.checkpointing.save_schedule import blocked_by_step, standstill
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.history import Execution, Executions, History, Save


def _save(begun: float, ended: float | None, blocked: float, step: int = 5, path: str = "a", rank: int = 0) -> Save:
    return Save(path, "torch", 0, step, (rank,), begun, ended, ended is not None, blocked, step)


def test_measured_and_bounded(trainer: Any) -> None:
    """Six saves that block for 0.5 s each: every bound passes above what was measured, and fails below it."""
    run = trainer(save_s=0.5).record()
    assert isinstance(CheckpointOverhead(), Assertion)
    measured = CheckpointOverhead().judge(run, []).measured
    assert (measured["checkpoints"], measured["blocked"]) == (6, 0.5)
    assert measured["blocked_share"] == pytest.approx(3.0 / measured["training_s"])
    for name in ("blocked", "blocked_share", "writing_share"):
        assert CheckpointOverhead(**{name: measured[name]}).judge(run, []).outcome is Outcome.PASSED  # it is allowed
        above, below = ({name: measured[name] * factor} for factor in (1.01, 0.99))
        assert CheckpointOverhead(**above).judge(run, []).outcome is Outcome.PASSED
        finding = CheckpointOverhead(**below).judge(run, [])
        assert (finding.outcome, finding.bound) == (Outcome.FAILED, below), finding.reason


@pytest.mark.parametrize(
    ("idle_after", "outcome"), [(0.0, Outcome.FAILED), (2.0, Outcome.INCONCLUSIVE)], ids=["waits", "does other things"]
)
def test_a_job_that_waits_for_a_save_in_another_thread(trainer: Any, idle_after: float, outcome: Outcome) -> None:
    """The call that saves returns at once, and no rank makes a step until the save is over, 4 s later: training stood
    still for it. A rank that goes on long after the save's end may have been busy with something else."""

    class Waits(trainer):  # type: ignore[misc]
        def emit(self, kind: Kind, data: Any, *who: Any, **when: Any) -> None:
            super().emit(kind, {**data, "phases": {"forward": 0.01}} if kind is Kind.STEP else data, *who, **when)

        def _save(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            data = {"path": f"/job/checkpoints/step-{step}", "format": "dcp"}
            self.emit(Kind.SAVE_BEGIN, data, 0, attempt, local)
            self._now += 4
            self.emit(Kind.SAVE_END, {**data, "ok": True, "blocked_s": 0.02}, 0, attempt, local)
            self._now += idle_after

    run = Waits().record()
    finding = CheckpointOverhead(blocked=3).judge(run, [])
    assert finding.outcome is outcome, finding.reason
    assert CheckpointOverhead(blocked=4.5).judge(run, []).outcome is Outcome.PASSED


def test_a_save_beside_the_training_costs_its_call() -> None:
    """Steps go on while another thread writes: training stood still for the call alone."""
    executions = [Execution(0, 0, n, 10 + 0.1 * n, n, phases={"forward": 0.09}) for n in range(1, 60)]
    history = History((), Executions.of(executions), (_save(11.0, 14.0, 0.02, 10),), (), "agent")
    assert standstill(history).blocked == standstill(history).possible == {(0, 10): pytest.approx(0.02, abs=0.005)}


@pytest.mark.filterwarnings("error")
def test_a_damaged_record_with_a_phase_without_end_prints_no_warning() -> None:
    """An infinite time in a call that saves costs nothing more than the call, and numpy says nothing about it."""
    phases = {"forward": 0.09, "checkpoint_write": float("inf")}
    executions = [Execution(0, 0, n, 10 + 0.1 * n, n, phases=phases) for n in range(1, 60)]
    history = History((), Executions.of(executions), (_save(11.0, 14.0, 0.02, 10),), (), "agent")
    assert standstill(history).blocked == {(0, 10): pytest.approx(0.02, abs=0.005)}


def test_files_of_one_checkpoint_are_one(trainer: Any) -> None:
    """What is saved after one step is one checkpoint, however many files it is."""
    saves = [_save(1, 2, 0.5), _save(2, 3, 0.25, path="b"), _save(9, 10, 0.1, step=6)]
    assert blocked_by_step(saves) == {(0, 5): 0.75, (0, 6): 0.1}


def test_ranks_that_write_side_by_side_wait_together(trainer: Any) -> None:
    """Two ranks that write a file of their own each, for 0.5 s at the same time, cost 0.5 s and not a second."""
    run = trainer(save_s=0.5).record()
    events = tuple(
        replace(e, data={**e.data, "path": f"{e.data['path']}/rank{e.rank}.pt"})
        if e.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END)
        else e
        for e in run.events
    )
    own = replace(run, events=events)
    assert len(own.history.saves) == 12
    finding = CheckpointOverhead(blocked=0.6).judge(own, [])
    assert (finding.outcome, finding.measured["blocked"]) == (Outcome.PASSED, 0.5), finding.reason


def test_overlapping_writes_count_once() -> None:
    """Two files that are written at the same time take the time of the longer one."""
    assert writing_s([_save(1, 4, 0), _save(2, 3, 0, path="b"), _save(6, 7, 0, step=6)]) == pytest.approx(4.0)


def test_nothing_seen(trainer: Any) -> None:
    """No save, or no step, is inconclusive and not cheap."""
    assert CheckpointOverhead(blocked=1.0).judge(trainer(every=1000).record(), []).outcome is Outcome.INCONCLUSIVE
