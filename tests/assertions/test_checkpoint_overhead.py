"""checkpoint_overhead: what the saves cost, against arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.checkpoint_overhead import CheckpointOverhead, writing_s
from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import Assertion, Outcome
from torchaos.harness.record.history import Save
from torchaos.harness.record.history.checkpoints import blocked_by_step


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
