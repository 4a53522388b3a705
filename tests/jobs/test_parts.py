"""The parts of the reference job, each alone."""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator

import dcgmi_stand_in
import pytest
import torch
import torch.distributed as dist
from torch import nn
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
    """What is not finite, a norm over ten times its rolling mean, or a loss over 1.5 times its own, is refused, and
    leaves the means as they were."""
    guard = fault_tolerance.Guard()
    assert not any(guard.suspects(4.0, norm) for norm in (3.0, 2.0, 2.5))
    mean = guard.mean
    for loss, norm in ((float("nan"), 2.0), (4.0, float("inf")), (4.0, 31.0), (6.1, 2.0)):
        assert guard.suspects(loss, norm)
    assert guard.mean == mean
    again = fault_tolerance.Guard()
    again.load_state_dict(guard.state_dict())
    assert again.suspects(4.0, 31.0)
    assert again.doubts(6.1)
    assert not again.doubts(5.9)


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


@pytest.fixture
def last_save(fault_tolerance: Any, alone: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with a store of this process, and with little patience."""
    module = importlib.import_module("last_save")
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(dist, "TCPStore", lambda *_any, **_more: HashStore())
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    return module


def in_a_step(done: int) -> Any:
    """A training that has changed its part before the weights."""
    parts, early = {"part": Part(8)}, {"part": Part(7)}
    return SimpleNamespace(
        model=nn.Linear(2, 2), done=done, began=time.monotonic(), changing=threading.Lock(), parts=parts, early=early
    )


def test_an_exception_saves_the_last_whole_step(last_save: Any, fault_tolerance: Any, tmp_path: Path) -> None:
    """The state is that of the end of the step before, and the exception is the job's own."""
    checkpoints = fault_tolerance.Checkpoints(tmp_path, 2, timedelta(seconds=30))
    with pytest.raises(RuntimeError, match="no memory"), last_save.LastSave(in_a_step(3), checkpoints, 60.0):
        raise RuntimeError("no memory")
    restored = Part(0)
    assert checkpoints.restore({"part": restored}) == 3
    assert restored.value == 7


@pytest.mark.parametrize("how", ["weights change", "a rank is silent", "no step is over"])
def test_what_is_not_whole_is_not_saved(
    how: str, last_save: Any, fault_tolerance: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the optimizer's step, before the first step, or while a rank does not answer."""
    checkpoints = fault_tolerance.Checkpoints(tmp_path, 2, timedelta(seconds=30))
    training = in_a_step(0 if how == "no step is over" else 3)
    if how == "weights change":
        training.changing.acquire()
    if how == "a rank is silent":
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="no memory"), last_save.LastSave(training, checkpoints, 60.0):
        raise RuntimeError("no memory")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_may_be_wrong_are_not_saved(last_save: Any, fault_tolerance: Any, tmp_path: Path) -> None:
    """Where the loss itself can't be right, the job goes back to its last checkpoint."""
    checkpoints = fault_tolerance.Checkpoints(tmp_path, 2, timedelta(seconds=30))
    with pytest.raises(fault_tolerance.Doubtful), last_save.LastSave(in_a_step(3), checkpoints, 60.0):
        raise fault_tolerance.Doubtful("loss nan")
    assert list(tmp_path.iterdir()) == []


def test_a_training_that_ends_well_saves_nothing_more(last_save: Any, fault_tolerance: Any, tmp_path: Path) -> None:
    """Its thread is over when the training is."""
    last = last_save.LastSave(in_a_step(3), fault_tolerance.Checkpoints(tmp_path, 2, timedelta(seconds=30)), 60.0)
    with last:
        pass
    assert not last.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_a_meeting_is_a_step_of_sgd_with_nesterov_momentum(fault_tolerance: Any, alone: None) -> None:
    """As torch's own, also when it goes on from its state in another process."""
    diloco = importlib.import_module("gpt_diloco")
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    common = [weight.detach().clone() for weight in model.parameters()]
    reference = torch.optim.SGD(common, lr=diloco.OUTER_RATE, momentum=diloco.OUTER_MOMENTUM, nesterov=True)
    outer = diloco.Outer(model)
    for meeting in range(4):
        if meeting == 2:
            state = copy.deepcopy(outer.state_dict())
            outer = diloco.Outer(model)
            outer.load_state_dict(state)
        with torch.no_grad():
            for weight, own in zip(model.parameters(), common, strict=True):
                moved = torch.randn_like(weight)
                weight.add_(moved)
                own.grad = -moved
        reference.step()
        outer.meet()
        for weight, own in zip(model.parameters(), common, strict=True):
            assert torch.allclose(weight, own, atol=1e-6)


def test_a_part_of_each_rank(fault_tolerance: Any, alone: None) -> None:
    """Its state is under the rank's name, so that a checkpoint holds that of every rank."""
    diloco = importlib.import_module("gpt_diloco")
    assert diloco.OfThisRank(Part(5)).state_dict() == {"rank0": {"value": 5}}
    part = Part(0)
    diloco.OfThisRank(part).load_state_dict({"rank0": {"value": 5}, "rank1": {"value": 6}})
    assert part.value == 5


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


def test_balance_gives_a_slow_rank_less(fault_tolerance: Any, alone: None, tmp_path: Path) -> None:
    """A rank that needs four times as long gets fewer samples until both need equally long, and as many as before when
    it is as fast as the other again. Nothing changes for a rank that is slow once, or only a little. The slow rank is
    named, also when the other takes longer for its larger share."""
    balance = fault_tolerance.Balance([24, 24], tmp_path / "slow.json")
    slow = (1.0, 4.0)

    def steps(number: int, each: tuple[float, float]) -> list[int]:
        shares: list[int] = balance.shares
        for _ in range(number):  # the time of a step: a quarter of that of 24 samples, and the samples
            shares = balance.after([factor * (6 + share) for factor, share in zip(each, shares, strict=True)])
            assert sum(shares) == 48
        return shares

    assert steps(20, (1.0, 1.4)) == [24, 24]
    assert steps(1, slow) == steps(10, (1.0, 1.0)) == [24, 24]
    assert not (tmp_path / "slow.json").exists()
    more, less = steps(20, slow)
    assert less < 12 < 36 < more
    assert 1 / 2 < 4 * (6 + less) / (6 + more) < 2
    again = steps(20, (1.0, 1.0))
    assert min(again) > 16
    assert json.loads((tmp_path / "slow.json").read_text()) == {"culprits": [1]}


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


def test_the_health_agent_sees_that_corrected_errors_rise(jobs: None) -> None:
    """By the number since the last look; the first look tells nothing, and a GPU that does not say is none."""
    agent = importlib.import_module("health_agent")
    assert agent.rising({}, {0: 10**6}) == []
    assert agent.rising({0: 10**6, 1: 0}, {0: 10**6 + 5, 1: 5000}) == [1]


def test_the_health_agent_sends_no_signal_that_would_kill(jobs: None) -> None:
    """A process that has no handler for SIGUSR1 would die of it."""
    agent = importlib.import_module("health_agent")
    assert not agent._catches(os.getpid(), signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, lambda *_any: None)
    try:
        assert agent._catches(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not agent._catches(0, signal.SIGUSR1)


@pytest.mark.parametrize(
    ("gpus", "told", "leaves"),
    [
        ("", "has 0\n", False),
        ("", "has 0\nsick 0\n", True),  # no GPU is named: there is no spare one
        ("0,1", "has 0 1\nsick 1\n", True),
        ("0,1", "has 0 1 2\nsick 1\n", False),  # the third is spare
        ("0,2", "has 0 1 2\nsick 1\n", False),  # and has taken its place
        ("0,1", "has 0 1 2\nsick 1\nsick 2\n", True),
    ],
)
def test_a_node_leaves_when_it_has_no_spare_gpu(jobs: None, gpus: str, told: str, leaves: bool) -> None:
    """Otherwise its job is started again on the spare one."""
    assert importlib.import_module("health_agent").leaves(gpus, told) == leaves


def test_a_node_leaves_when_ranks_were_killed_there_too_often(
    jobs: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a rank that a machine may have ended counts: one whose peer is gone ends by an exception, or aborts. A rank
    that failed its self-test counts at once."""
    agent = importlib.import_module("health_agent")
    monkeypatch.setattr(agent, "EVERY_S", 0.0)
    lines = [
        f"E1127 api.py:984] failed (exitcode: {code}) local_rank: 0".encode() for code in (-9, 1, -6, -15, -11, -7)
    ]
    left: list[int] = []
    agent.strikes(iter([*lines[:4], b"-9 ranks"]), 2, lambda: left.append(1))
    assert not left
    agent.strikes(iter(lines), 2, lambda: left.append(2))
    assert left == [2]  # once, though a third rank was killed
    assert capfd.readouterr().err.count("failed (exitcode: -9)") == 2  # torchrun's lines are passed on
    wrong = importlib.import_module("self_test").WRONG
    agent.strikes(iter([*lines[:2], f"failed (exitcode: {wrong})".encode()]), 0, lambda: left.append(3))
    assert left == [2, 3]


@pytest.mark.parametrize("what", ["", "product", "memory"])
def test_the_self_test_finds_one_wrong_answer(what: str, jobs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry of a product that is off by one, or a byte that does not keep its value. Otherwise nothing is wrong."""
    module = importlib.import_module("self_test")
    product, full = torch.nn.functional.linear, torch.full

    def wrong_product(*of: torch.Tensor) -> torch.Tensor:
        done = product(*of)
        done[3, 5] += 1
        return done

    def wrong_memory(*shape: Any, **more: Any) -> torch.Tensor:
        return full(*shape, **more).index_fill_(0, torch.tensor([7]), 9)

    if what == "product":
        monkeypatch.setattr(torch.nn.functional, "linear", wrong_product)
    elif what == "memory":
        monkeypatch.setattr(torch, "full", wrong_memory)
    problem = module.problem(torch.device("cpu"))
    assert (problem is None) == (not what), problem
    assert not what or (problem.startswith("1 of ") and what in problem.replace("bytes", "memory"))


@pytest.mark.parametrize("code", [0, 1])
def test_a_node_that_fails_its_self_test_does_not_join(code: int, jobs: None, tmp_path: Path) -> None:
    """Then its torchrun is not started."""
    agent = Path(importlib.import_module("health_agent").__file__ or "")
    (tmp_path / "health_agent.py").write_text(agent.read_text())
    (tmp_path / "self_test.py").write_text(f"raise SystemExit({code})")
    joined = tmp_path / "joined"
    words = [sys.executable, str(tmp_path / "health_agent.py"), "--self-test", "touch", str(joined)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, joined.exists()) == (code, not code), done.stderr
    assert ("does not join" in done.stdout) == bool(code)
