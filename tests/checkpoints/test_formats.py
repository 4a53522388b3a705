"""The table of checkpoint formats: it is made from their declarations, including those of other packages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from torchaos.harness import registry
from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Files, Local
from torchaos.harness.checkpoints.formats import format_table
from torchaos.harness.checkpoints.formats.format import Format
from torchaos.harness.checkpoints.layout import Checkpoint, Extent, Shard, TensorEntry, Trouble, torn
from torchaos.harness.fault_drivers.checkpoint_edits import Text, tracker
from torchaos.harness.interfaces import UsageError


class Raw(Format):
    """Bytes as they are: one tensor of type uint8."""

    name = "raw"
    suffixes = (".raw", ".npy")
    starts = (b"RAW!",)
    metadata = ("raw.list",)
    tracker = "newest.raw"
    needed_files: ClassVar[Mapping[str, str]] = {"the model": "model", "the optimizer's state": "optimizer"}

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return "raw.list" in names

    def read_file(self, files: Files, path: str, size: int, into: Checkpoint, prefix: str = "") -> None:
        if size % 4:
            raise torn("it is cut off")
        into.tensors[f"{prefix}it"] = TensorEntry(
            f"{prefix}it", "uint8", (size,), (Shard((0,), (size,), Extent(path, 0, size)),)
        )


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The format Raw, as another package would offer it."""
    ours = registry._entries("formats")
    theirs = EntryPoint("raw", f"{__name__}:Raw", "torchaos.formats")
    monkeypatch.setattr(registry, "_entries", lambda group: (*ours, theirs))
    format_table.table.cache_clear()
    yield
    format_table.table.cache_clear()


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True)
    for name, contents in files.items():
        (folder / name.replace("_", ".")).write_bytes(contents)
    return folder


def read(path: Path) -> Checkpoint:
    return formats.read(Local(), str(path))


def test_no_two_formats_claim_the_same_files() -> None:
    """Which format reads a file does not depend on the order in which formats are asked."""
    claimed = Counter(end for one in format_table.table() for end in (*one.suffixes, *one.parts, *one.metadata))
    assert claimed
    assert {end for end, count in claimed.items() if count > 1} == set()


@pytest.mark.parametrize(
    ("names", "path", "form"),
    [
        ((".metadata",), "step-1", "dcp"),
        ((".metadata", "common.pt"), "iter_0000001", "megatron"),
        ((".metadata", "common.pt"), "step-1", "dcp"),
        (("mp_rank_00",), "step-1", "megatron"),
        (("trainer_state.json", "model.safetensors.index.json"), "checkpoint-1", "huggingface"),
        (("random_states_0.pkl", "model.safetensors.index.json"), "checkpoint_1", "accelerate"),
        (("mp_rank_00_model_states.pt",), "global_step1", "deepspeed"),
        (("shard-00001-model-00001-of-00001.safetensors", "x.safetensors.index.json"), "step-1", "dcp_safetensors"),
        (("model.safetensors.index.json",), "step-1", "sharded"),
        (("model.pt",), "step-1", "dir"),
        (("model.pt",), "weights", None),
    ],
)
def test_the_more_special_format_is_asked_first(names: Sequence[str], path: str, form: str | None) -> None:
    """A folder that several formats could read is of the most special of them."""
    found = format_table.of_folder(Local(), path, names)
    assert (found.name if found else None) == form


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "checkpoint_3.pth.tar", "last.ckpt"])
def test_files_of_torch_save_by_their_usual_names(name: str, tmp_path: Path) -> None:
    """Also the name that the ImageNet example of PyTorch gives them."""
    torch.save({"weight": torch.ones(4)}, tmp_path / name)
    found = read(tmp_path / name)
    assert (found.format, found.problems, found.unread, list(found.tensors)) == ("torch", [], [], ["weight"])


def test_parameters_may_be_keys(tmp_path: Path) -> None:
    """torch loads such a file, so it is no damaged file; what stands under each parameter is read."""
    first, second = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    torch.save({"state": {first: {"z": torch.ones(2)}, second: {"z": torch.zeros(2)}}}, tmp_path / "keys.pt")
    found = read(tmp_path / "keys.pt")
    assert (found.problems, len(found.tensors)) == ([], 2)


def test_a_format_of_another_package_is_one_class(raw: None, tmp_path: Path) -> None:
    """Found, read, checked for what a resume needs, and told by name, first bytes and folder: all from its class."""
    one = write(tmp_path / "all" / "one", raw_list=b"", model_raw=b"abcd", optimizer_raw=b"abcd")
    torn_one = write(tmp_path / "all" / "step-2", model_raw=b"abc")
    alone = write(tmp_path / "all" / "files", model_raw=b"abcd", model_npy=b"abcd")
    assert formats.find(Local(), str(tmp_path)) == [
        *(str(path) for path in sorted(alone.iterdir())), str(one), str(torn_one),
    ]  # fmt: skip
    found = read(one)
    assert (found.format, sorted(found.tensors)) == ("raw", ["model.raw:it", "optimizer.raw:it"])
    assert {file.path.rpartition("/")[2]: file.role for file in found.files}["raw.list"] == "metadata"
    assert (found.problems, found.missing) == ([], [])
    assert read(write(tmp_path / "other", raw_list=b"", model_raw=b"abcd")).missing == ["the optimizer's state"]
    (problem,) = read(torn_one).problems
    assert (problem.kind, problem.text) == (Trouble.TORN, "model.raw: it is cut off")
    unnamed = tmp_path / "unnamed"
    unnamed.write_bytes(b"RAW!")
    assert read(unnamed).format == "raw"
    assert format_table.may_hold_tensors("a/model.raw")
    assert formats.unread(Local(), str(tmp_path)) == {}


def test_its_tracker_can_be_damaged(raw: None, tmp_path: Path) -> None:
    """The file that names its newest checkpoint is known to the faults, and to `verify`."""
    one = write(tmp_path / "one", raw_list=b"", model_raw=b"abcd")
    (tmp_path / "newest.raw").write_text("gone")
    assert [found.target for found in formats.trackers(Local(), str(tmp_path))] == [None]
    assert tracker(read(one), [], "empty") == Text(tmp_path / "newest.raw", b"")


def test_a_format_without_its_base_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not inherit from Format is named, with the class to inherit from."""
    theirs = EntryPoint("half", f"{__name__}:Half", "torchaos.formats")
    monkeypatch.setattr(registry, "_entries", lambda group: (theirs,))
    format_table.table.cache_clear()
    with pytest.raises(UsageError, match=r"'half' .* does not inherit from torchaos\.plugin\.checkpoints\.Format"):
        format_table.table()
    format_table.table.cache_clear()


class Half:
    name = "half"
    suffixes = ()
