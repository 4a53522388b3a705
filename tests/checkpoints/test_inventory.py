"""The inventory of complete and of damaged checkpoints, in each format."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from xxhash import xxh3_64_hexdigest

from torchaos.harness.checkpoints.formats.dcp import check_boxes
from torchaos.harness.checkpoints.inventory import take
from torchaos.harness.checkpoints.layout import Unreadable

TENSORS = {"model.weight", "model.half", "optimizer.step"}
VALUES = {"optimizer.lr": "0.1", "optimizer.groups.0.params.1": "1", "rng.0": "3", "epoch": "2"}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_dcp(tmp_path: Path, kit: Any) -> None:
    """A DCP folder: every tensor and value by its nested name, and the step from its name."""
    kit.dcp(tmp_path / "step-40")
    found = kit.only(tmp_path)
    assert (found["path"], found["format"], found["step"]) == ("step-40", "dcp", 40)
    assert (found["complete"], found["loadable"], found["problem"]) == (True, True, None)
    assert set(found["tensors"]) == TENSORS
    assert found["values"].items() >= VALUES.items()
    assert found["values"]["rng.1"].startswith("625 numbers, digest ")
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "step-40").iterdir())


def test_torch_save(tmp_path: Path, kit: Any) -> None:
    """A torch.save file has the same digests as a DCP folder with the same contents, and its step from its contents."""
    torch.save({**kit.state, "global_step": 9}, tmp_path / "last.ckpt")
    found = kit.only(tmp_path)
    assert (found["path"], found["format"], found["step"], found["problem"]) == ("last.ckpt", "torch", 9, None)
    assert found["values"].items() >= VALUES.items()
    assert found["tensors"] == kit.only(kit.dcp(tmp_path / "step-1"))["tensors"]


def test_keys_that_are_addresses_have_the_names_of_their_places(tmp_path: Path, kit: Any) -> None:
    """Some optimizers keep their state by id(parameter), another in each process: two runs must have the same names,
    and the contents are compared. Small numbers stay names, and the order of the file counts."""
    for name, ids in (
        ("a", (140_703_128_616_960, 139_684_140_544_832)),
        ("b", (94_512_000_000_000, 94_511_000_000_000)),
    ):
        (tmp_path / name).mkdir()
        momentum = {key: torch.tensor([float(place)]) for place, key in enumerate(ids)}
        torch.save({"m": momentum, "state": {0: torch.ones(1), 7: torch.ones(1)}}, tmp_path / name / "o.pt")
    first, second = (kit.only(tmp_path / name)["tensors"] for name in "ab")
    assert first == second
    assert set(first) == {"m.id 0", "m.id 1", "state.0", "state.7"}


def test_safetensors(tmp_path: Path, kit: Any) -> None:
    """A safetensors file, read without its library, has the same digests as well."""
    data = struct.pack("<12f", *range(12))
    kit.safetensors(tmp_path / "model.safetensors", {"weight": ("F32", [3, 4], data), "none": ("F32", [0], b"")})
    found = kit.only(tmp_path)
    assert (found["format"], found["complete"], found["loadable"]) == ("safetensors", True, True)
    torch.save({"weight": kit.state["model"]["weight"], "none": torch.empty(0)}, tmp_path / "same.pt")
    assert found["tensors"] == kit.only(tmp_path / "same.pt")["tensors"]


def test_one_changed_bit_changes_one_digest(tmp_path: Path, kit: Any) -> None:
    """Contents differ by value, type and shape, each on its own."""
    weight = torch.zeros(4)
    other = weight.clone()
    other[3] = -0.0
    torch.save({"a": weight, "b": other, "c": weight.reshape(2, 2), "d": weight.to(torch.int32)}, tmp_path / "x.pt")
    assert len(set(kit.only(tmp_path)["tensors"].values())) == 4


def test_folder_of_files(tmp_path: Path, kit: Any) -> None:
    """A Transformers-like folder is one checkpoint: the union of its files, its step from trainer_state.json."""
    folder = tmp_path / "run" / "checkpoint-3"
    folder.mkdir(parents=True)
    kit.safetensors(folder / "model.safetensors", {"weight": ("F32", [1], b"\0\0\0\0")})
    torch.save({"state": {0: {"exp_avg": torch.ones(1)}}}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 15, "log_history": [{"loss": 1.0}]}))
    (tmp_path / "run" / "latest").symlink_to(folder)
    found = kit.only(tmp_path)
    assert (found["path"], found["format"], found["step"]) == ("run/checkpoint-3", "huggingface", 15)
    assert set(found["tensors"]) == {"model.safetensors:weight", "optimizer.pt:state.0.exp_avg"}
    assert found["values"]["trainer_state.json:global_step"] == "15"


def test_nothing_is_run(tmp_path: Path, kit: Any) -> None:
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
    alone, partly, metadata = kit.taken(tmp_path / "saved")
    assert not trap.exists()
    for found, file in ((alone, "alone.pt"), (partly, "args.bin"), (metadata, ".metadata")):
        assert (found["loadable"], found["unopened"]) == (False, [file])
    assert alone["problem"] == "alone.pt: loading it without weights_only would run posix.mkdir"
    assert set(partly["tensors"]) == {"model.pt:a"}


def test_foreign_objects(tmp_path: Path, kit: Any) -> None:
    """Objects of classes that are not known are seen as the data that would make them, and told as opaque."""
    model = torch.nn.Linear(2, 1)
    options = argparse.Namespace(lr=0.1, sizes=[1, 2])
    torch.save({"model": model, "options": options, "at": datetime.timedelta(1)}, tmp_path / "x.pt")
    found = kit.only(tmp_path)
    assert set(found["tensors"]) == {"model._parameters.weight", "model._parameters.bias"}
    assert found["values"].items() >= {"options.lr": "0.1", "model.training": "True", "at.0": "1"}.items()
    assert set(found["opaque"]) == {"model", "at"}
    assert (found["complete"], found["loadable"], found["problem"]) == (True, True, None)


def test_old_form(tmp_path: Path, kit: Any) -> None:
    """The form of torch.save before 1.6, with no zip around it, has the same contents."""
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"a": weight, "view": weight.t(), "b": torch.ones(3, dtype=torch.int16), "step": 3}
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    new, old = kit.taken(tmp_path)
    assert (old["problem"], old["step"]) == (None, 3)
    assert (old["tensors"], old["values"]) == (new["tensors"], new["values"])
    os.truncate(tmp_path / "old.pt", (tmp_path / "old.pt").stat().st_size - 4)
    assert "cut off" in kit.only(tmp_path / "old.pt")["problem"]


def test_flipped_bit(tmp_path: Path, kit: Any) -> None:
    """torch loads a flipped bit without a word; the CRC that nobody else compares tells it, in both formats."""
    torch.save({"a": torch.zeros(1000)}, tmp_path / "step-1.pt")
    kit.flip(tmp_path / "step-1.pt", 2000)
    kit.dcp(tmp_path / "step-2", {"a": torch.zeros(1000)})
    kit.flip(tmp_path / "step-2" / "__0_0.distcp", 2000)
    assert torch.load(tmp_path / "step-1.pt")["a"].any()
    for found in kit.taken(tmp_path):
        assert (found["complete"], found["loadable"]) == (True, True)
        assert "the CRC differs" in (found["problem"] or ""), found


def test_no_crcs(tmp_path: Path, kit: Any) -> None:
    """Where torch was told to write no CRCs, their absence is no damage."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.zeros(1000)}, tmp_path / "step-1.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert kit.only(tmp_path)["problem"] is None


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: os.truncate(folder / "__0_0.distcp", 100), "cut off"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "missing; it held"),
        (lambda folder: (folder / ".metadata").unlink(), "no .metadata"),
        (lambda folder: os.truncate(folder / ".metadata", 50), ".metadata can't be read"),
        (lambda folder: os.truncate(folder / ".metadata", 0), ".metadata can't be read"),
    ],
)
def test_incomplete_dcp(damage: Any, says: str, tmp_path: Path, kit: Any) -> None:
    """A DCP folder that lacks a part is neither complete nor loadable, and the reason names what is missing."""
    damage(kit.dcp(tmp_path / "step-5"))
    found = kit.only(tmp_path)
    assert (found["format"], found["complete"], found["loadable"]) == ("dcp", False, False)
    assert says in (found["problem"] or "")


@pytest.mark.parametrize("length", [0, 3, 60, 900])
def test_cut_off_files(length: int, tmp_path: Path, kit: Any) -> None:
    """Files that were cut off anywhere are incomplete, and reading goes on with the next one."""
    torch.save({"a": torch.zeros(500)}, tmp_path / "a.pt")
    kit.safetensors(tmp_path / "b.safetensors", {"weight": ("F32", [500], bytes(2000))})
    torch.save({"a": torch.zeros(5)}, tmp_path / "c.pt")
    for name in ("a.pt", "b.safetensors"):
        os.truncate(tmp_path / name, length)
    first, second, third = kit.taken(tmp_path)
    assert not first["loadable"]
    assert first["problem"]
    assert (second["complete"], second["loadable"]) == (False, False)
    assert (third["complete"], third["loadable"]) == (True, True)


@pytest.mark.parametrize("name", ["step-6.partial", ".step-6", "tmp-checkpoint-6", "step-6.damaged", "step-6.tmp"])
def test_names_of_unfinished_ones(name: str, tmp_path: Path, kit: Any) -> None:
    """What its writer calls unfinished is reported as incomplete, even when all of it is there, and even when empty."""
    kit.dcp(tmp_path / name)
    assert (kit.only(tmp_path)["complete"], kit.only(tmp_path)["loadable"]) == (False, True)
    shutil.rmtree(tmp_path / name)
    (tmp_path / name).mkdir()
    assert (kit.only(tmp_path)["complete"], kit.only(tmp_path)["loadable"]) == (False, False)


@pytest.mark.parametrize(
    ("boxes", "says"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], None),
        ([((0, 0), (4, 1)), ((0, 1), (1, 3)), ((1, 1), (3, 3))], None),  # no grid, and whole
        ([((0, 0), (2, 4))], "not the whole tensor"),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], "overlap"),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "overlap"),
        ([((0, 0), (2, 4)), ((3, 0), (2, 4))], "beyond"),
    ],
)
def test_boxes(boxes: Any, says: str | None) -> None:
    """The parts of a sharded tensor fill it without a gap or an overlap, in whatever way it was cut."""
    if says is None:
        check_boxes((4, 4), boxes)
    else:
        with pytest.raises(Unreadable, match=says):
            check_boxes((4, 4), boxes)


def test_take(tmp_path: Path) -> None:
    """The inventory lists all checkpoints under a folder, in the order of their names."""
    torch.save({"a": torch.ones(3), "step": 4}, tmp_path / "a.pt")
    torch.save({"a": torch.ones(3), "step": 5}, tmp_path / "b.pt")
    inventory = take(tmp_path)
    assert (inventory["root"], inventory["problem"]) == (str(tmp_path), None)
    assert [(one["path"], one["step"]) for one in inventory["checkpoints"]] == [("a.pt", 4), ("b.pt", 5)]
    assert inventory["checkpoints"][0]["tensors"] == inventory["checkpoints"][1]["tensors"]


def test_take_that_fails(tmp_path: Path) -> None:
    """What keeps it from reading is said, and never raised: no such folder, no time, no patience."""
    torch.save({"a": torch.ones(3), "step": 4}, tmp_path / "a.pt")
    assert "no such file or directory" in take(tmp_path / "none")["problem"]
    assert take(tmp_path, timeout_s=0)["problem"] == "not read within 0 s"
    assert take(tmp_path, given_up=lambda: True)["checkpoints"] == []


@pytest.mark.parametrize(
    "name",
    ["micro3/state.0", "model.tar", "x.chk", "current", "snapshot_17", ".ckpts/weights", "a.model", "b.mdl",
     "c.weights", "d.p", "old.npz", "step-5/weights", "step-5/model.tar", "step-5/x.0"],
)  # fmt: skip
@pytest.mark.parametrize("write", [torch.save, lambda state, path: save_file(state["model"], path)])
def test_what_the_job_was_seen_to_save_is_a_checkpoint(name: str, write: Any, tmp_path: Path) -> None:
    """Whatever its name is, and whichever library wrote it: its contents tell the format. Files that the job did not
    save are left out, unless they lie in the folder of a checkpoint."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write({"model": {"w": torch.ones(3)}}, path)
    (tmp_path / "run.log").write_text("step 1")
    found = take(tmp_path, seen=[str(path)])
    (one,) = found["checkpoints"]
    assert (len(one["tensors"]), one["problem"], one["unread"], found["unread"]) == (1, None, [], {})
    assert one["path"] == ("step-5" if name.startswith("step-5") else name)


@pytest.mark.parametrize("name", ["x.chk", "step-5/weights", "model.tar"])
def test_a_cut_off_file_of_any_name_is_torn(name: str, tmp_path: Path) -> None:
    """A file whose beginning tells its format, and whose end is missing."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    torch.save({"w": torch.ones(3000)}, path)
    os.truncate(path, 5000)
    (one,) = take(tmp_path, seen=[str(path)])["checkpoints"]
    assert (one["complete"], "not a complete" in one["problem"]) == (False, True), one["problem"]


def test_other_files_in_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    """Archives, links and notes that no library of checkpoints wrote are no parts of it."""
    folder = tmp_path / "step-5"
    folder.mkdir()
    torch.save({"w": torch.ones(3)}, folder / "model.pt")
    with zipfile.ZipFile(folder / "code", "w") as archive:
        archive.writestr("train.py", "pass")
    (folder / "latest").symlink_to("nothing")
    (folder / "notes").write_text("12345678{ no header")
    (one,) = take(tmp_path)["checkpoints"]
    assert (one["problems"], len(one["tensors"])) == ([], 1)


def test_json_that_is_cut_off(tmp_path: Path) -> None:
    """Its save was not finished, wherever it was cut; JSON that is broken before its end is damaged."""
    whole = json.dumps({"step": 10, "names": ["a", None, True], "rate": 1.5e-05, "in": {"b": "c"}})
    folder = tmp_path / "step-10"
    folder.mkdir()
    torch.save({"w": torch.ones(3)}, folder / "model.pt")
    for length in range(len(whole)):
        (folder / "state.json").write_text(whole[:length])
        assert not take(tmp_path)["checkpoints"][0]["complete"], length
    (folder / "state.json").write_text(whole.replace("10", "10 x"))
    (one,) = take(tmp_path)["checkpoints"]
    assert (one["complete"], one["loadable"]) == (True, False)


def test_the_mark_of_an_unfinished_checkpoint(tmp_path: Path, kit: Any) -> None:
    """NeMo 2 keeps a file beside a checkpoint until it is finished."""
    for step in (10, 20):
        kit.dcp(tmp_path / f"model--step={step}" / "weights")
    (tmp_path / "model--step=20-unfinished").touch()
    assert [one["complete"] for one in take(tmp_path)["checkpoints"]] == [True, False]


def test_folders_of_ranks_that_are_not_megatrons(tmp_path: Path) -> None:
    """NeMo 1 has a folder for each rank, too, with Lightning's files: none of Megatron's is missing."""
    for rank in (0, 1):
        (tmp_path / f"mp_rank_0{rank}").mkdir()
        torch.save(
            {"state_dict": {"w": torch.ones(3)}, "global_step": 10}, tmp_path / f"mp_rank_0{rank}/gpt-step=10.ckpt"
        )
    assert [(one["path"][-12:], one["problem"]) for one in take(tmp_path)["checkpoints"]] == [
        ("step=10.ckpt", None)
    ] * 2


def test_names_of_steps_and_of_ranks(tmp_path: Path) -> None:
    """Composer counts batches; a file that is called by a number alone is that of a rank."""
    (tmp_path / "snap").mkdir()
    for name in ("ep0-ba20-rank0.pt", "snap/7"):
        torch.save({"w": torch.ones(3)}, tmp_path / name)
    found = take(tmp_path, seen=[str(tmp_path / "snap/7")])["checkpoints"]
    assert [(one["path"], one["step"]) for one in found] == [("ep0-ba20-rank0.pt", 20), ("snap/7", None)]


def test_all_values_of_a_json_file_are_read(tmp_path: Path) -> None:
    """Lists and objects in it, too: a job may keep the state of its environment there. A vocabulary of a tokenizer is
    one entry."""
    folder = tmp_path / "step-5"
    folder.mkdir()
    torch.save({"w": torch.ones(3)}, folder / "model.pt")
    (folder / "env.json").write_text(json.dumps({"returns": [1.5, 2], "rng": {"state": [7] * 5}, "t": 3}))
    (folder / "vocab.json").write_text(json.dumps({"vocab": {f"token{n}": n for n in range(30_000)}}))
    (folder / "env.pkl").write_bytes(pickle.dumps([1, 2]))
    (only,) = take(tmp_path)["checkpoints"]
    values = {name: value for name, value in only["values"].items() if ".json:" in name}
    assert values.pop("vocab.json:vocab").startswith("'many entries, digest ")
    assert (values["env.json:returns.0"], values["env.json:rng.state.4"], values["env.json:t"]) == ("1.5", "7", "3")
    assert len(values) == 8
    assert only["unread_files"] == {"env.pkl": xxh3_64_hexdigest(pickle.dumps([1, 2]))}


@pytest.mark.parametrize("line", ["{}", "{}\n", "sha256:{}", "{}  model.pt\n", "{} *model.pt"])
def test_a_file_with_the_digest_of_another_is_not_compared(tmp_path: Path, line: str) -> None:
    """The bytes of a file that torch.save writes differ after a resume, though its contents are equal. A digest that
    is wrong is compared."""
    folder = tmp_path / "step-5"
    folder.mkdir()
    torch.save({"w": torch.ones(3)}, folder / "model.pt")
    right = hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest()
    (folder / "model.pt.sha256").write_text(line.format(right))
    (folder / "model.digest").write_text(line.format(right.upper()))
    (folder / "model.wrong").write_text(line.format("0" * 64))
    (only,) = take(tmp_path)["checkpoints"]
    assert set(only["unread_files"]) == {"model.wrong"}


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    """Beside the checkpoints, and in a folder that holds nothing else: no damage, and nothing that was looked at."""
    (tmp_path / "state-5.npz").write_bytes(b"PK")
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "state.h5").write_bytes(b"x")
    found = take(tmp_path)
    assert found["unread"] == {".npz": 1}
    (only,) = found["checkpoints"]
    assert (only["unread"], only["complete"], "are not read" in only["problems"][0]["text"]) == ([".h5"], True, True)
    assert only["unread_files"] == {"state.h5": xxh3_64_hexdigest(b"x")}
