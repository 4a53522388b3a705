"""The parts of the reference job, each alone."""

from __future__ import annotations

import importlib
import socket
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any, Iterator

import dcgmi_stand_in
import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from warm import python

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
    here = f"import sys; sys.path.insert(0, {str(Path(fault_tolerance.__file__).parent)!r})"
    watch = "f.watch(datetime.timedelta(seconds=.3)); t.Event().wait(60)"
    done = python(f"{here}; import fault_tolerance as f, datetime, threading as t; {watch}")
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


def test_balance_gives_a_slow_rank_less(fault_tolerance: Any, alone: None) -> None:
    """A rank that needs four times as long gets fewer samples until both need equally long, and as many as before when
    it is as fast as the other again. Nothing changes for a rank that is slow once, or only a little."""
    balance = fault_tolerance.Balance([24, 24])
    slow = (1.0, 4.0)

    def steps(number: int, each: tuple[float, float]) -> list[int]:
        shares: list[int] = balance.shares
        for _ in range(number):  # the time of a step: a quarter of that of 24 samples, and the samples
            shares = balance.after([factor * (6 + share) for factor, share in zip(each, shares, strict=True)])
            assert sum(shares) == 48
        return shares

    assert steps(20, (1.0, 1.4)) == [24, 24]
    assert steps(1, slow) == steps(10, (1.0, 1.0)) == [24, 24]
    more, less = steps(20, slow)
    assert less < 12 < 36 < more
    assert 1 / 2 < 4 * (6 + less) / (6 + more) < 2
    again = steps(20, (1.0, 1.0))
    assert min(again) > 16


def test_patiently_tries_again_and_says_why(
    fault_tolerance: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What fails twice is done a third time; what fails for longer than the patience fails with its own error."""
    monkeypatch.setattr(fault_tolerance.time, "sleep", lambda _s: None)
    tries: list[int] = []

    def third_time() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("the store is away")

    fault_tolerance.patiently(third_time, 60.0)
    assert len(tries) == 3
    assert capsys.readouterr().out.count("the store is away") == 2
    tries.clear()
    with pytest.raises(OSError, match="the store is away"):
        fault_tolerance.patiently(third_time, -1.0)
    assert len(tries) == 1


def test_the_health_agent_reads_xids_in_the_kernels_log(jobs: None) -> None:
    """By the driver's own form of the line: the PCI address of the GPU, and the number. /dev/kmsg gives one record for
    each read, as a socket gives a datagram."""
    agent = importlib.import_module("health_agent")
    log, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    log.setblocking(False)
    with log, kernel:
        assert list(agent._logged(log.fileno())) == []
        for text in ("NVRM: Xid (PCI:0000:3B:00): 79, GPU has fallen off the bus.", "NVRM: GPU 0000:3b:00.0: RmInit"):
            kernel.send(f"2,41,212393,-;{text}\n".encode())
        assert list(agent._logged(log.fileno())) == [((0, 0x3B, 0), 79)]
        assert list(agent._logged(log.fileno())) == []
    assert agent._place("00000000:3B:00.0") == (0, 0x3B, 0)


def test_the_health_agent_asks_dcgm(jobs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU for which DCGM shows a fatal Xid is sick; another Xid, or no value, is nothing."""
    agent = importlib.import_module("health_agent")
    dcgmi_stand_in.put_on_path(tmp_path, monkeypatch)
    assert agent._seen_by_dcgm() == {}
    for gpu, number in ((0, 79), (1, 13)):
        subprocess.run(["dcgmi", "test", "--inject", "--gpuid", str(gpu), "-f", "230", "-v", str(number)], check=True)
    assert agent._seen_by_dcgm() == {0: "DCGM shows Xid 79"}
