"""What the inventory says of whole and of damaged checkpoints, in each format."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from torchaos.harness.checkpoints import dcp, reader
from torchaos.harness.checkpoints.contents import Contents
from torchaos.harness.checkpoints.inventory import take

STATE = {
    "model": {"weight": torch.arange(12.0).reshape(3, 4), "half": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer": {"step": torch.tensor(7.0), "lr": 0.1, "groups": [{"params": [0, 1]}]},
    "rng": (3, tuple(range(625)), None),
    "epoch": 2,
}
TENSORS = {"model.weight", "model.half", "optimizer.step"}
VALUES = {"optimizer.lr": "0.1", "optimizer.groups.0.params.1": "1", "rng.0": "3", "epoch": "2"}


def write_dcp(folder: Path, state: dict[str, Any] | None = None) -> Path:
    save(dict(state or STATE), checkpoint_id=folder, no_dist=True)
    return folder


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    entries: dict[str, Any] = dict(header)
    for name, (kind, shape, content) in tensors.items():
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def only(root: Path) -> reader.Checkpoint:
    (path,) = reader.checkpoints(root)
    return reader.read(path, root)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp(tmp_path: Path) -> None:
    """A DCP folder: every tensor and value by its nested name, and the step from its name."""
    write_dcp(tmp_path / "step-40")
    found = only(tmp_path)
    assert (found.path, found.format, found.step) == ("step-40", "dcp", 40)
    assert (found.complete, found.loadable, found.problem) == (True, True, None)
    assert set(found.tensors) == TENSORS
    assert found.values.items() >= VALUES.items()
    assert found.values["rng.1"].startswith("625 numbers, digest ")
    assert found.bytes == sum(path.stat().st_size for path in (tmp_path / "step-40").iterdir())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_save(tmp_path: Path) -> None:
    """A torch.save file has the same digests as a DCP folder with the same contents, and its step from its contents."""
    torch.save({**STATE, "global_step": 9}, tmp_path / "last.ckpt")
    found = only(tmp_path)
    assert (found.path, found.format, found.step, found.problem) == ("last.ckpt", "torch", 9, None)
    assert found.values.items() >= VALUES.items()
    assert found.tensors == reader.read(write_dcp(tmp_path / "step-1"), tmp_path).tensors


def test_safetensors(tmp_path: Path) -> None:
    """A safetensors file, read without its library, has the same digests as well."""
    data = struct.pack("<12f", *range(12))
    write_safetensors(tmp_path / "model.safetensors", {"weight": ("F32", [3, 4], data), "none": ("F32", [0], b"")})
    found = only(tmp_path)
    assert (found.format, found.complete, found.loadable) == ("safetensors", True, True)
    torch.save({"weight": STATE["model"]["weight"], "none": torch.empty(0)}, tmp_path / "same.pt")  # type: ignore[index]
    assert found.tensors == reader.read(tmp_path / "same.pt", tmp_path).tensors


def test_one_changed_bit_changes_one_digest(tmp_path: Path) -> None:
    """Contents differ by value, type and shape, each on its own."""
    weight = torch.zeros(4)
    other = weight.clone()
    other[3] = -0.0
    torch.save({"a": weight, "b": other, "c": weight.reshape(2, 2), "d": weight.to(torch.int32)}, tmp_path / "x.pt")
    assert len(set(only(tmp_path).tensors.values())) == 4


def test_folder_of_files(tmp_path: Path) -> None:
    """A Transformers-like folder is one checkpoint: the union of its files, its step from trainer_state.json."""
    folder = tmp_path / "run" / "checkpoint-3"
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", {"weight": ("F32", [1], b"\0\0\0\0")})
    torch.save({"state": {0: {"exp_avg": torch.ones(1)}}}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 15, "log_history": [{"loss": 1.0}]}))
    (tmp_path / "run" / "latest").symlink_to(folder)
    found = only(tmp_path)
    assert (found.path, found.format, found.step) == ("run/checkpoint-3", "dir", 15)
    assert set(found.tensors) == {"model.safetensors:weight", "optimizer.pt:state.0.exp_avg"}
    assert found.values["trainer_state.json:global_step"] == "15"


def test_nothing_is_run(tmp_path: Path) -> None:
    """A pickle that would run code is not opened: it says so, and the code has not run."""
    trap = tmp_path / "trap"

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(trap),)

    folder = tmp_path / "saved" / "step-1"
    folder.mkdir(parents=True)
    torch.save({"bomb": Bomb()}, folder / "args.bin")
    torch.save({"a": torch.ones(1)}, folder / "model.pt")
    (tmp_path / "saved" / "step-2").mkdir()
    (tmp_path / "saved" / "step-2" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    torch.save({"bomb": Bomb()}, tmp_path / "saved" / "alone.pt")
    alone, partly, metadata = (reader.read(path, tmp_path) for path in reader.checkpoints(tmp_path / "saved"))
    assert not trap.exists()
    assert (alone.loadable, alone.problem) == (False, "alone.pt: not opened: needs pickle")
    assert (partly.loadable, partly.unopened, set(partly.tensors)) == (True, ["args.bin"], {"model.pt:a"})
    assert not metadata.loadable
    assert metadata.unopened == ["step-2"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flipped_bit(tmp_path: Path) -> None:
    """torch loads a flipped bit without a word; the CRC that nobody else compares tells it, in both formats."""
    torch.save({"a": torch.zeros(1000)}, tmp_path / "step-1.pt")
    flip(tmp_path / "step-1.pt", 2000)
    write_dcp(tmp_path / "step-2", {"a": torch.zeros(1000)})
    flip(tmp_path / "step-2" / "__0_0.distcp", 2000)
    assert torch.load(tmp_path / "step-1.pt")["a"].any()
    for found in (reader.read(path, tmp_path) for path in reader.checkpoints(tmp_path)):
        assert (found.complete, found.loadable) == (True, True)
        assert "the CRC differs" in (found.problem or ""), found


def test_no_crcs(tmp_path: Path) -> None:
    """Where torch was told to write no CRCs, their absence is no damage."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.zeros(1000)}, tmp_path / "step-1.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert only(tmp_path).problem is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: os.truncate(folder / "__0_0.distcp", 100), "cut off"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "No such file"),
        (lambda folder: (folder / ".metadata").unlink(), "no .metadata"),
        (lambda folder: os.truncate(folder / ".metadata", 50), ".metadata can't be read"),
        (lambda folder: os.truncate(folder / ".metadata", 0), ".metadata can't be read"),
    ],
)
def test_incomplete_dcp(damage: Any, says: str, tmp_path: Path) -> None:
    """A DCP folder that lacks a part is neither complete nor loadable, and the reason names what is missing."""
    damage(write_dcp(tmp_path / "step-5"))
    found = only(tmp_path)
    assert (found.format, found.complete, found.loadable) == ("dcp", False, False)
    assert says in (found.problem or "")


@pytest.mark.parametrize("length", [0, 3, 60, 900])
def test_cut_off_files(length: int, tmp_path: Path) -> None:
    """Files that were cut off anywhere are incomplete, and reading goes on with the next one."""
    torch.save({"a": torch.zeros(500)}, tmp_path / "a.pt")
    write_safetensors(tmp_path / "b.safetensors", {"weight": ("F32", [500], bytes(2000))})
    torch.save({"a": torch.zeros(5)}, tmp_path / "c.pt")
    for name in ("a.pt", "b.safetensors"):
        os.truncate(tmp_path / name, length)
    first, second, third = (reader.read(path, tmp_path) for path in reader.checkpoints(tmp_path))
    assert not first.loadable
    assert first.problem
    assert (second.complete, second.loadable) == (False, False)
    assert (third.complete, third.loadable) == (True, True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["step-6.partial", ".step-6", "tmp-checkpoint-6", "step-6.damaged", "step-6.tmp"])
def test_names_of_unfinished_ones(name: str, tmp_path: Path) -> None:
    """What its writer calls unfinished is reported as incomplete, even when all of it is there, and even when empty."""
    write_dcp(tmp_path / name)
    assert (only(tmp_path).complete, only(tmp_path).loadable) == (False, True)
    shutil.rmtree(tmp_path / name)
    (tmp_path / name).mkdir()
    assert (only(tmp_path).complete, only(tmp_path).loadable) == (False, False)


def test_missing_chunk(tmp_path: Path) -> None:
    """A tensor that was saved in parts and lacks one of them is incomplete, not filled up with what memory held."""
    found = Contents()
    with found.noting("weight"):
        chunk = type("Chunk", (), {"offsets": (0,), "sizes": (2,)})
        properties = type("Properties", (), {"dtype": torch.float32})
        whole = type("Whole", (), {"size": torch.Size([4]), "properties": properties, "chunks": [chunk]})
        dcp._assemble(tmp_path, whole, [], found, "weight")
    assert found.problems == ["weight: its chunks are not the whole tensor"]
    assert not found.complete


def test_take(tmp_path: Path) -> None:
    """The harness gets all of them from another process, whose Python need not have torchaos."""
    torch.save({"a": torch.ones(3), "step": 4}, tmp_path / "a.pt")
    torch.save({"a": torch.ones(3), "step": 5}, tmp_path / "b.pt")
    inventory = take(tmp_path, sys.executable)
    assert (inventory["root"], inventory["problem"]) == (str(tmp_path), None)
    assert [(one["path"], one["step"]) for one in inventory["checkpoints"]] == [("a.pt", 4), ("b.pt", 5)]
    assert inventory["checkpoints"][0]["tensors"] == inventory["checkpoints"][1]["tensors"]


def test_take_that_fails(tmp_path: Path) -> None:
    """What keeps it from reading is said, and never raised: no such folder, no such Python, no torch, no time."""
    assert "no such file or folder" in take(tmp_path / "none", sys.executable)["problem"]
    assert "No such file" in take(tmp_path, str(tmp_path / "python"))["problem"]
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o700)
    assert "No module named 'torch'" in take(tmp_path, str(bare))["problem"]
    assert take(tmp_path, sys.executable, timeout_s=0.01)["problem"] == "not read within 0.01 s"
