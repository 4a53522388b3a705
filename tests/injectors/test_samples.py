"""Checkpoints that Megatron and TorchTitan wrote (tests/checkpoints/samples): they are read, damaged, verified, and
restored."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.layout import Trouble
from torchaos.harness.checkpoints.verify import verify

from .conftest import Operation, snapshot

SAMPLES = Path(__file__).parents[1] / "checkpoints" / "samples"
WHOLE = {"megatron": ("iter_0000020", "megatron", 16), "torchtitan": ("step-20", "dcp", 17)}


@pytest.fixture(params=WHOLE)
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLES / request.param, tmp_path / request.param))


def test_they_are_whole(sample: Path) -> None:
    """The one checkpoint is found, is of its format and step, and nothing is wrong with it."""
    name, form, count = WHOLE[sample.name]
    assert formats.find(Local(), str(sample)) == [str(sample / name)]
    found = verify(Local(), str(sample / name))
    assert (found.layout.format, found.layout.step, len(found.layout.tensors)) == (form, 20, count)
    assert (found.problems, found.unseen) == ([], [])
    assert all(one.target == str(sample / name) for one in formats.trackers(Local(), str(sample)))


@pytest.mark.parametrize(
    ("damage", "params"),
    [
        ("flip_bits", {}), ("flip_bits", {"bits": 7}), ("zero_block", {}), ("nan", {}), ("truncate", {}),
        ("delete", {"what": "shard"}), ("delete", {"what": "metadata"}), ("partial", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_damage_is_found_and_put_back(
    operate: Callable[..., Operation], sample: Path, damage: str, params: Any, seed: int
) -> None:
    """What each damage leaves is no whole checkpoint, with no manifest to tell; the undo gives every byte back."""
    before = snapshot(sample)
    done = operate(f"checkpoint.{damage}", sample, seed, **params).apply()
    assert verify(Local(), str(sample / WHOLE[sample.name][0])).problems
    assert done.take_back()
    assert snapshot(sample) == before


def test_each_file_of_megatron(tmp_path: Path) -> None:
    """Any one of its files that is gone is missed."""
    for name in sorted(path.name for path in (SAMPLES / "megatron" / "iter_0000020").iterdir()):
        folder = Path(shutil.copytree(SAMPLES / "megatron" / "iter_0000020", tmp_path / name / "iter_0000020"))
        (folder / name).unlink()
        found = verify(Local(), str(folder))
        assert not found.layout.complete, (name, found.problems)


def test_a_tracker_that_names_nothing(operate: Callable[..., Operation], tmp_path: Path) -> None:
    """Megatron's tracker, emptied by the fault, leads nowhere."""
    root = Path(shutil.copytree(SAMPLES / "megatron", tmp_path / "checkpoints"))
    done = operate("checkpoint.tracker", root).apply()
    assert [one.target for one in formats.trackers(Local(), str(root))] == [None]
    assert done.take_back()


def test_megatron_of_torch(tmp_path: Path) -> None:
    """Its older format, a folder for each rank of tensor parallelism, as its code names them: a rank that is missing is
    missed, the last one too, since each file has the arguments of the run."""
    folder = tmp_path / "iter_0000020"
    for rank in (0, 1):
        (folder / f"mp_rank_{rank:02}").mkdir(parents=True)
        state = {
            "args": argparse.Namespace(tensor_model_parallel_size=2),
            "iteration": 20,
            "model": {"w": torch.ones(9)},
        }
        torch.save(state, folder / f"mp_rank_{rank:02}" / "model_optim_rng.pt")
    found = verify(Local(), str(folder))
    assert (found.layout.format, found.layout.step, found.problems) == ("megatron", 20, [])
    shutil.rmtree(folder / "mp_rank_01")
    assert [(one.kind, one.text) for one in verify(Local(), str(folder)).problems] == [
        (Trouble.TORN, "mp_rank_01: missing")
    ]
