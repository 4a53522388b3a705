"""The parts of the reference job, each alone."""

from __future__ import annotations

import importlib
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

SAMPLES, BATCH = 40, 12  # three global batches an epoch


@pytest.fixture
def fault_tolerance(jobs: None) -> Any:
    return importlib.import_module("fault_tolerance")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def global_batches(monkeypatch: pytest.MonkeyPatch, ranks: int, start: int, count: int) -> list[set[int]]:
    """The global batches from `start` on, put together from what each rank would get."""
    found: list[set[int]] = [set() for _ in range(count)]
    for rank in range(ranks):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
        sampler = importlib.import_module("gpt").GlobalBatches(SAMPLES, BATCH, seed=5)
        sampler.load_state_dict({"position": start})
        for number, batch in zip(range(count), sampler, strict=False):
            assert len(batch) == BATCH // ranks
            found[number] |= set(batch)
    return found


def test_sampler_any_number_of_ranks(jobs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, two or four share out the same global batches, also when they start in the second epoch."""
    whole = global_batches(monkeypatch, 1, 0, 8)
    for ranks in (2, 4):
        assert global_batches(monkeypatch, ranks, 0, 8) == whole
        assert global_batches(monkeypatch, ranks, 4, 4) == whole[4:]


def test_sampler_repeats_nothing(jobs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within an epoch no sample comes twice, and the next epoch has another order."""
    batches = global_batches(monkeypatch, 2, 0, 6)
    assert len(set().union(*batches[:3])) == 3 * BATCH
    assert batches[:3] != batches[3:]


def test_guard(fault_tolerance: Any) -> None:
    """What is not finite, or over ten times the rolling mean, is refused and leaves the mean as it was."""
    guard = fault_tolerance.Guard()
    assert not any(guard.suspects(4.0, norm) for norm in (3.0, 2.0, 2.5))
    mean = guard.mean
    for loss, norm in ((float("nan"), 2.0), (4.0, float("inf")), (4.0, 31.0)):
        assert guard.suspects(loss, norm)
    assert guard.mean == mean
    again = fault_tolerance.Guard()
    again.load_state_dict(guard.state_dict())
    assert again.suspects(4.0, 31.0)


def test_watch(jobs: None, fault_tolerance: Any) -> None:
    """A step that takes too long ends the process, and says where it was."""
    watch = "f.watch(datetime.timedelta(seconds=.3)); t.Event().wait(60)"
    stuck = f"import fault_tolerance as f, datetime, threading as t; {watch}"
    folder = str(Path(fault_tolerance.__file__).parent)
    done = subprocess.run([sys.executable, "-c", stuck], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "wait" in done.stderr


class Part:
    """State of one number."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_keeps_the_newest(fault_tolerance: Any, alone: None, tmp_path: Path) -> None:
    """Old checkpoints go when a new one is complete, dead leftovers at the start, and the newest is loaded."""
    (tmp_path / "step-2.partial").mkdir()
    checkpoints = fault_tolerance.Checkpoints(tmp_path, 2, timedelta(seconds=30))
    for step in (1, 2, 10):
        checkpoints.save(step, {"part": Part(step)})
    checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-2"]
    restored = Part(0)
    assert checkpoints.restore({"part": restored}) == 10
    assert restored.value == 10


def test_failed_save(fault_tolerance: Any, alone: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A save that fails is reported and training goes on; the last one can't be passed over in silence."""
    checkpoints = fault_tolerance.Checkpoints(tmp_path, 2, timedelta(seconds=30))
    (tmp_path / "step-1.partial").write_text("in the way")
    checkpoints.save(1, {"part": Part(1)})
    checkpoints.save(2, {"part": Part(2)})
    assert "the checkpoint before step 2 failed, training goes on" in capfd.readouterr().out
    checkpoints.wait()
    assert checkpoints.restore({"part": Part(0)}) == 2
    (tmp_path / "step-3.partial").write_text("in the way")
    checkpoints.save(3, {"part": Part(3)})
    with pytest.raises((OSError, fault_tolerance.CheckpointException)):
        checkpoints.wait()


@pytest.mark.parametrize("what", ["manifest.json", ".metadata"])
def test_incomplete_checkpoint(what: str, fault_tolerance: Any, alone: None, tmp_path: Path) -> None:
    """A checkpoint that lacks a file is put aside, and the one before it is loaded; with none left it starts afresh."""
    checkpoints = fault_tolerance.Checkpoints(tmp_path, 3, timedelta(seconds=30))
    for step in (1, 2):
        checkpoints.save(step, {"part": Part(step)})
    checkpoints.wait()
    for left in (1, 0):
        (tmp_path / f"step-{left + 1}" / what).unlink()
        assert checkpoints.restore({"part": Part(0)}) == left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1.damaged", "step-2.damaged"]
