"""The reference job loses nothing if it is killed, preempted, or given damaged checkpoints or another number of
ranks."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any, Callable

import pytest

pytestmark = pytest.mark.job
Gpt = Callable[..., Any]
BOTH = pytest.mark.parametrize("form", ["ddp", "fsdp2"])


def copy(ran: Any, folder: Path, *, without: str = "") -> Path:
    shutil.copytree(ran.folder, folder)
    if without:
        shutil.rmtree(folder / without)
    return folder


@pytest.mark.long
@BOTH
def test_killed_while_it_saves(form: str, gpt: Gpt, unfaulted: Gpt, bitwise: Gpt, tmp_path: Path) -> None:
    """A rank that dies while a checkpoint is written costs the steps since the one before, and changes no loss."""

    def saves(log: str, folder: Path) -> bool:
        return (folder / "step-16.partial").exists() or "step 17 loss" in log  # too late, on a busy machine

    ran = gpt(form, tmp_path / "run", when=saves)
    assert ran.exit_code == 0, ran.log
    assert ran.restarted_right(8), ran.log
    bitwise(ran, unfaulted(form))
    assert ran.checkpoints == {"step-8", "step-16", "step-24"}


@pytest.mark.long
@pytest.mark.parametrize("step", [3, 13, 17, 23])
def test_killed_between_saves(step: int, gpt: Gpt, unfaulted: Gpt, bitwise: Gpt, tmp_path: Path) -> None:
    """Before the first checkpoint it starts again from nothing, later from the newest; no loss changes."""
    ran = gpt("ddp", tmp_path / "run", when=lambda log, folder: f"step {step} loss" in log)
    assert ran.exit_code == 0, ran.log
    assert ran.restarted_right(8), ran.log
    bitwise(ran, unfaulted("ddp"))


@pytest.mark.long  # tests/e2e/test_main_job.py shows it, too
@BOTH
def test_damaged_checkpoint(form: str, gpt: Gpt, unfaulted: Gpt, bitwise: Gpt, tmp_path: Path) -> None:
    """One flipped bit in the newest checkpoint, which torch would load, makes it go back to the one before."""
    folder = copy(unfaulted(form), tmp_path / "run")
    shard = folder / "step-24" / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    ran = gpt(form, folder)
    assert ran.exit_code == 0, ran.log
    assert "step-24: __1_0.distcp is not what was written" in ran.log
    assert ran.starts == [16]
    bitwise(ran, unfaulted(form))
    assert ran.checkpoints == {"step-8", "step-16", "step-24", "step-24.damaged"}


@pytest.mark.long  # tests/e2e/test_gpu_faults.py shows it, too
def test_preempted(gpt: Gpt, unfaulted: Gpt, bitwise: Gpt, tmp_path: Path) -> None:
    """A SIGTERM to one rank makes all save after the same step; then no step is done twice."""
    folder = tmp_path / "run"
    ran = gpt("ddp", folder, when=lambda log, _: "step 11 loss" in log, signum=signal.SIGTERM)
    assert ran.exit_code == 0, ran.log
    steps = [step for step, _ in ran.losses]
    assert steps == list(range(1, 25)), ran.log
    assert re.search(rf"preempted after step {ran.starts[1]}\b", ran.log)
    bitwise(ran, unfaulted("ddp"))


@pytest.mark.parametrize("form", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_fewer_ranks(form: str, gpt: Gpt, unfaulted: Gpt, tmp_path: Path) -> None:
    """A checkpoint of two ranks goes on with one: the same global batches, so nearly the same losses (dropout)."""
    ran = gpt(form, copy(unfaulted(form), tmp_path / "run", without="step-24"), ranks=1)
    assert ran.exit_code == 0, ran.log
    assert ran.starts == [16]
    expected = dict(unfaulted(form).losses)
    assert [step for step, _ in ran.losses] == list(range(17, 25))
    for step, loss in ran.losses:
        assert float(loss) == pytest.approx(float(expected[step]), rel=0.02)
        assert ran.rates[step] == unfaulted(form).rates[step]


def test_done_already(gpt: Gpt, unfaulted: Gpt, tmp_path: Path) -> None:
    """Started again after its last step, it does none and ends well, as a requeued job should."""
    ran = gpt("ddp", copy(unfaulted("ddp"), tmp_path / "run"))
    assert ran.exit_code == 0, ran.log
    assert (ran.starts, ran.losses) == ([24], [])


@pytest.mark.long
def test_three_ranks(gpt: Gpt, bitwise: Gpt, tmp_path: Path) -> None:
    """With three ranks, where the order of a sum shows in its last bits, a restart still changes no loss."""
    reference = gpt("ddp", tmp_path / "reference", ranks=3)
    ran = gpt("ddp", tmp_path / "run", ranks=3, when=lambda log, _: "step 13 loss" in log)
    assert (reference.exit_code, ran.exit_code) == (0, 0), ran.log
    bitwise(ran, reference)


@pytest.mark.long  # the end-to-end tests judge them
@pytest.mark.parametrize("part", ["rng", "optimizer", "sampler", "schedule"])
def test_broken_on_purpose(part: str, gpt: Gpt, unfaulted: Gpt, tmp_path: Path) -> None:
    """Each broken variant trains to its end and exits with 0, with other losses; only one has other learning rates."""
    folder = copy(unfaulted("ddp"), tmp_path / "run", without="step-24")
    ran = gpt(f"tests/trainers/broken/no_{part}.py", folder)
    assert ran.exit_code == 0, ran.log
    assert ran.starts == [16]
    expected = dict(unfaulted("ddp").losses)
    assert [step for step, _ in ran.losses] == list(range(17, 25))
    assert sum(expected[step] != loss for step, loss in ran.losses) >= 5
    rates = {step: unfaulted("ddp").rates[step] for step in ran.rates}
    assert (ran.rates != rates) == (part == "schedule")
