"""The two tiers of checkpoints of gpt_tiers.py: from which one a resume goes on, and what does not count."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


class Part:
    """State of one number."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.fixture
def tiers(jobs: None) -> Iterator[Any]:
    """The module, in a process group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield importlib.import_module("gpt_tiers")
    dist.destroy_process_group()


def saved(tiers: Any, folder: Path) -> Any:
    """Checkpoints after steps 1 to 5; that of step 4 is on the shared file system, too."""
    store = tiers.Tiers(folder, 3, timedelta(seconds=30))
    for step in range(1, 6):
        store.save(step, {"part": Part(step)})
    store.wait()
    return store


def resumed(store: Any) -> int:
    part = Part(0)
    step: int = store.restore({"part": part})
    assert part.value == step
    return step


def test_the_newest_is_on_the_local_disk(tiers: Any, tmp_path: Path) -> None:
    """The shared file system has an older one."""
    assert resumed(saved(tiers, tmp_path)) == 5


@pytest.mark.parametrize("damage", ["torn", "not whole", "gone"])
def test_a_part_that_was_not_written_to_its_end_does_not_count(tiers: Any, tmp_path: Path, damage: str) -> None:
    """A peer that dies while it copies leaves a file without its digest, or with another one: the step before is used,
    which the shared file system has."""
    store = saved(tiers, tmp_path)
    part = tmp_path / "local" / "step-5" / "rank-0.pt"
    if damage == "torn":
        part.write_bytes(part.read_bytes()[:-1])
    elif damage == "not whole":
        part.with_suffix(".json").unlink()
    else:
        part.unlink()
    assert resumed(store) == 4


def test_a_disk_that_is_lost_leaves_the_shared_file_system(tiers: Any, tmp_path: Path) -> None:
    """And with that gone, too, the job starts afresh."""
    store = saved(tiers, tmp_path)
    shutil.rmtree(tmp_path / "local")
    assert resumed(store) == 4
    shutil.rmtree(tmp_path / "step-4")
    assert resumed(store) == 0


def test_a_checkpoint_lacks_a_rank_whose_part_is_nowhere(tiers: Any) -> None:
    """Of two ranks, both parts must be on some node; after step 10 only one is."""
    here, there = {"parts": {5: {0: 2}, 10: {0: 2}}}, {"parts": {5: {1: 2}}}
    assert tiers._parts([here, there], 5) == {0, 1}
    assert tiers._parts([here, there], 10) == set()
    assert tiers._parts([here, there], 15) == set()
