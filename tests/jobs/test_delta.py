"""The job whose checkpoints build upon each other."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.verify import verify
from torchaos.harness.record.result import ExitCode


class Part:
    """Weights that change with each step, and a counter."""

    def __init__(self) -> None:
        self.weight, self.steps = torch.zeros(64), 0
        self.was_loaded = False

    def step(self) -> None:
        self.steps += 1
        self.weight.copy_(torch.sin(self.weight + self.steps))  # in place, as an optimizer does

    def state_dict(self) -> dict[str, Any]:
        if self.was_loaded:  # like an optimizer, whose state then has another order, and more in it
            return {"more": torch.ones(64), "steps": self.steps, "weight": self.weight}
        return {"weight": self.weight, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.steps, self.was_loaded = state["weight"], state["steps"], True


@pytest.fixture
def module(jobs: None) -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield importlib.import_module("gpt_delta")
    dist.destroy_process_group()


def trained(module: Any, folder: Path, steps: int) -> Part:
    """Goes on from what is in the folder, and saves after each step."""
    part = Part()
    checkpoints = module.Deltas(folder, 2, timedelta(seconds=30))
    for step in range(checkpoints.restore({"part": part}) + 1, steps + 1):
        part.step()
        checkpoints.save(step, {"part": part})
    return part


def base_of(folder: Path, step: int) -> str | None:
    base: str | None = json.loads((folder / f"step-{step}" / "manifest.json").read_text())["base"]
    return base


def test_a_chain_gives_back_what_was_saved(module: Any, tmp_path: Path) -> None:
    """Bit for bit, and a job that was started again builds upon what it has loaded, as if it had not been."""
    part = trained(module, tmp_path, 8)
    assert [base_of(tmp_path, step) for step in (5, 6, 7, 8)] == ["step-4", None, "step-6", "step-7"]
    again = trained(module, tmp_path, 8)
    assert (again.steps, torch.equal(again.weight, part.weight)) == (8, True)
    trained(module, tmp_path, 11)
    assert [base_of(tmp_path, step) for step in (9, 10, 11)] == ["step-8", "step-9", None]
    straight = trained(module, tmp_path / "straight", 11)
    last = trained(module, tmp_path, 11)
    assert (last.steps, torch.equal(last.weight, straight.weight)) == (11, True)
    deltas = [
        torch.load(folder / "step-9" / "rank-0.pt")["state"]["part"]["weight"]
        for folder in (tmp_path, tmp_path / "straight")
    ]
    assert torch.equal(*deltas)  # the first after the restart holds the same changes
    assert not (tmp_path / "step-5").exists()  # two that hold everything are kept, with what builds upon them


def test_it_goes_back_to_before_a_damaged_link(module: Any, tmp_path: Path) -> None:
    """The newest is what was written, and builds upon one that is not. torchaos's own check sees it, too."""
    trained(module, tmp_path, 9)
    file = tmp_path / "step-8" / "rank-0.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    answers = {step: verify(Local(), str(tmp_path / f"step-{step}")).code for step in (7, 8, 9)}
    assert answers.pop(7) is not ExitCode.FAILED
    assert set(answers.values()) == {ExitCode.FAILED}
    again = Part()
    assert module.Deltas(tmp_path, 2, timedelta(seconds=30)).restore({"part": again}) == again.steps == 7
    assert {path.name for path in tmp_path.glob("*.damaged")} == {"step-8.damaged", "step-9.damaged"}
