"""checkpoint.*: the journal records the damage to the byte, and it is undone byte for byte."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from torchaos.harness import registry
from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.wire import Kind, Phase
from torchaos.harness.scenario.checks import check_parameters

from .conftest import Operation, snapshot, state_of

Operate = Callable[..., Operation]

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("checkpoint.flip_bits", {"bits": 3}),
    ("checkpoint.flip_bits", {"place": "metadata"}),
    ("checkpoint.zero_block", {"bytes": 512}),
    ("checkpoint.nan", {}),
    ("checkpoint.nan", {"fix_crc": True}),
    ("checkpoint.truncate", {}),
    ("checkpoint.truncate", {"keep": 0.5}),
    ("checkpoint.torn_write", {}),
    ("checkpoint.delete", {"what": "shard"}),
    ("checkpoint.partial", {}),
    ("checkpoint.stale_shard", {}),
    ("checkpoint.foreign_shard", {}),
    ("checkpoint.tracker", {"how": "empty"}),
    ("checkpoint.tracker", {"how": "stale"}),
    ("checkpoint.permissions", {}),
]
IDS = ["-".join([name.partition(".")[2], *map(str, params.values())]) for name, params in KINDS]


@pytest.mark.parametrize(("name", "params"), KINDS, ids=IDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_recorded_and_undone(operate: Operate, ranked_root: Path, name: str, params: Any, seed: int) -> None:
    """Exactly the files that the journal names differ, only in the newest complete checkpoint or what names it, their
    times of change stay, and after the undo every byte, mode and time is as before."""
    before = snapshot(ranked_root)
    done = operate(name, ranked_root, seed, **params).apply()
    after = snapshot(ranked_root)
    changed = {path for path in before if after.get(path) != before[path]}
    assert changed == {Path(one["file"]) for one in done.damaged}
    assert all(path.parent.name == "global_step20" or path.name == "latest" for path in changed), changed
    assert all(after[path][2] == before[path][2] for path in changed & after.keys())
    assert not any(handle.is_undone() for handle in done.handles)
    assert done.take_back()
    assert snapshot(ranked_root) == before


def test_the_bytes_are_those_of_the_journal(operate: Operate, dcp_root: Path) -> None:
    """Offset, and the bytes before and after, are what lies in the file."""
    files = {path: path.read_bytes() for path in dcp_root.rglob("*") if path.is_file()}
    for one in operate("checkpoint.flip_bits", dcp_root, bits=5).apply().damaged:
        old, new, at = files[Path(one["file"])], Path(one["file"]).read_bytes(), one["offset"]
        assert (old[at : at + 1].hex(), new[at : at + 1].hex()) == (one["before"], one["after"])
        assert one["part"] in ("weight", "moments.m", "moments.v")


def test_the_seed_decides(operate: Operate, dcp_root: Path) -> None:
    """Two plans of one seed do the same; ten seeds do more than one thing."""

    def places(seed: int) -> str:
        done = operate("checkpoint.flip_bits", dcp_root, seed).apply()
        done.take_back()
        return str([(one["file"], one["offset"], one["after"]) for one in done.damaged])

    assert places(1) == places(1)
    assert len({places(seed) for seed in range(10)}) > 5


def test_the_newest_k(operate: Operate, dcp_root: Path) -> None:
    """`newest: 2` hits both complete ones, and never the unfinished one; more than there are is said."""
    done = operate("checkpoint.truncate", dcp_root, newest=2).apply()
    assert {Path(one["checkpoint"]).name for one in done.damaged} == {"step-10", "step-20"}
    done.take_back()
    with pytest.raises(ChaosError, match="has 2 complete checkpoints, but 3"):
        operate("checkpoint.truncate", dcp_root, newest=3).apply()


def test_the_newest_without_a_step(operate: Operate, tmp_path: Path) -> None:
    """Of files whose step is not known, the newest is the one that was written last, whatever their names are."""
    root = tmp_path / "out"
    root.mkdir()
    for number, name in enumerate(("model-5.pt", "optim-5.pt", "model-10.pt", "optim-10.pt")):
        torch.save({"x": torch.arange(9.0)}, root / name)
        os.utime(root / name, (number, number))
    done = operate("checkpoint.truncate", root, 1, newest=2).apply()
    assert [Path(one["file"]).name for one in done.damaged] == ["optim-10.pt", "model-10.pt"]


def test_nothing_to_damage(operate: Operate, tmp_path: Path, dcp_root: Path) -> None:
    """No folder, no checkpoint, or nothing of that kind in it: a sentence, and nothing is changed."""
    empty = tmp_path / "empty"
    empty.mkdir()
    none = tmp_path / "none"
    for root, words in ((none, "No such file"), (empty, "no complete checkpoint"), (dcp_root, "two ranks")):
        with pytest.raises(ChaosError, match=words):
            operate("checkpoint.foreign_shard", root).apply()
    with pytest.raises(ChaosError, match="says which checkpoint is the newest"):
        operate("checkpoint.tracker", dcp_root).apply()


class TestDuringASave:
    """In the phase `checkpoint_written` the very checkpoint is hit that is being saved."""

    def test_the_one_being_saved(self, operate: Operate, dcp_root: Path) -> None:
        """It is the one that was written last, though its name says that it is not finished; the name that it gets
        afterwards is followed, and the undo finds it there."""
        before = {path.name: path.read_bytes() for path in (dcp_root / "step-30.partial").iterdir()}
        done = operate("checkpoint.torn_write", dcp_root, phase=Phase.CHECKPOINT_WRITTEN).apply()
        (told,) = done.damaged
        assert Path(told["checkpoint"]).name == "step-30.partial"
        (probe,) = done.injector.probes(done.site)
        (dcp_root / "step-30.partial").rename(dcp_root / "step-30")
        probe.sample(done.site.emit)
        probe.sample(done.site.emit)
        seen = [data for _kind, data in done.events if data["what"] in ("renamed", "gone")]
        final = str(dcp_root / "step-30" / Path(told["file"]).name)
        assert [(data["what"], data["file"], data["to"]) for data in seen] == [("renamed", told["file"], final)]
        assert Path(final).read_bytes() != before[Path(final).name]
        assert done.take_back()
        assert {path.name: path.read_bytes() for path in (dcp_root / "step-30").iterdir()} == before

    @pytest.mark.parametrize("name", ["step-30.tmp", "step-30.pt.tmp", ".step-30.pt"])
    def test_a_file_with_another_name(self, operate: Operate, torch_root: Path, name: str) -> None:
        """A single file that gets its name in the end; what takes its place later is another file, the damage gone."""
        torch.save({"w": torch.ones(5000)}, torch_root / name)
        (torch_root / ".lock").write_text("of the job, and no checkpoint")
        for path in torch_root.iterdir():
            os.utime(path, ns=(0, 1))  # all within one tick of the file system's clock
        done = operate("checkpoint.flip_bits", torch_root, phase=Phase.CHECKPOINT_WRITTEN).apply()
        assert {Path(one["file"]).name for one in done.damaged} == {name}
        (probe,) = done.injector.probes(done.site)
        (torch_root / name).rename(torch_root / "step-30.pt")
        probe.sample(done.site.emit)
        (torch_root / "step-30.pt").unlink()
        probe.sample(done.site.emit)
        assert [data["what"] for _kind, data in done.events][-2:] == ["renamed", "gone"]
        assert done.take_back()

    def test_not_whole_yet(self, operate: Operate, dcp_root: Path) -> None:
        """Where another rank still writes its part there is nothing to damage yet: a sentence, and nothing happens."""
        (dcp_root / "step-30.partial" / ".metadata").unlink()
        before = snapshot(dcp_root)
        with pytest.raises(ChaosError, match="not whole yet"):
            operate("checkpoint.flip_bits", dcp_root, phase=Phase.CHECKPOINT_WRITTEN).apply()
        assert snapshot(dcp_root) == before


def test_a_bit_that_flips_in_dcp_loads(operate: Operate, dcp_root: Path) -> None:
    """DCP's own loader takes the damaged checkpoint without a word, with one value that is another."""
    operate("checkpoint.flip_bits", dcp_root).apply()
    moments = {"m": torch.zeros(70).bfloat16(), "v": torch.zeros(3000)}
    state = {"weight": torch.zeros(60, 50), "moments": moments, "step": 0}
    load(state, checkpoint_id=dcp_root / "step-20", no_dist=True)
    want = state_of(20)
    wrong = differing_bytes(state["weight"], want["weight"])
    assert wrong + sum(differing_bytes(moments[name], want["moments"][name]) for name in ("m", "v")) == 1


def differing_bytes(one: Any, other: Any) -> int:
    return int((one.view(torch.uint8) != other.view(torch.uint8)).sum())


@pytest.mark.parametrize("fix_crc", [False, True])
def test_a_nan_whose_crc_fits(operate: Operate, torch_root: Path, fix_crc: bool) -> None:
    """With `fix_crc` the zip is consistent in itself: only the contents tell."""
    operate("checkpoint.nan", torch_root, fix_crc=fix_crc).apply()
    path = torch_root / "step-20.pt"
    with zipfile.ZipFile(path) as archive:
        assert (archive.testzip() is None) == fix_crc
    state = torch.load(path)
    tensors = [state["weight"], state["moments"]["m"], state["moments"]["v"]]
    assert sum(int(tensor.isnan().sum()) for tensor in tensors) == 1


def test_a_nan_in_dcp_whose_crc_fits(operate: Operate, dcp_root: Path) -> None:
    """Also in an item of a DCP file, which is a zip in itself."""
    done = operate("checkpoint.nan", dcp_root, fix_crc=True).apply()
    assert [one["part"] for one in done.damaged[1:]] == ["CRC", "CRC"]
    found = formats.read(Local(), str(dcp_root / "step-20"))
    for one in found.checksums:
        data = Path(one.extent.file).read_bytes()[one.extent.offset : one.extent.end]
        assert zlib.crc32(data) == one.crc, one.what


class TestTheJobGoesOn:
    """What the job does with the damaged file meanwhile stands, and the undo is complete all the same."""

    def test_moved_aside(self, operate: Operate, dcp_root: Path) -> None:
        """The reference job renames the folder: nothing comes back at the old place, and it is whole where it is."""
        before = {path.name: path.read_bytes() for path in (dcp_root / "step-20").iterdir()}
        done = operate("checkpoint.flip_bits", dcp_root).apply()
        (dcp_root / "step-20").rename(dcp_root / "step-20.damaged")
        assert done.take_back()
        assert not (dcp_root / "step-20").exists()
        assert {path.name: path.read_bytes() for path in (dcp_root / "step-20.damaged").iterdir()} == before

    def test_removed(self, operate: Operate, torch_root: Path) -> None:
        """A checkpoint that the job has rotated away is not brought back."""
        done = operate("checkpoint.flip_bits", torch_root).apply()
        (torch_root / "step-20.pt").unlink()
        assert done.take_back()
        assert not (torch_root / "step-20.pt").exists()

    def test_replaced(self, operate: Operate, torch_root: Path) -> None:
        """A new save under the same name stays."""
        done = operate("checkpoint.flip_bits", torch_root).apply()
        (torch_root / "new").write_bytes(b"a newer one")
        os.replace(torch_root / "new", torch_root / "step-20.pt")
        assert done.take_back()
        assert (torch_root / "step-20.pt").read_bytes() == b"a newer one"

    def test_deleted_by_the_fault_comes_back(self, operate: Operate, dcp_root: Path) -> None:
        """What the fault itself removed is put back."""
        before = snapshot(dcp_root)
        assert operate("checkpoint.delete", dcp_root).apply().take_back()
        assert snapshot(dcp_root) == before

    def test_it_is_said_when_the_damage_is_gone(self, operate: Operate, dcp_root: Path) -> None:
        """The probe is silent while it is there, and says once that it is not."""
        done = operate("checkpoint.flip_bits", dcp_root).apply()
        (probe,) = done.injector.probes(done.site)
        probe.sample(done.site.emit)
        assert not [data for _kind, data in done.events if data.get("what") == "gone"]
        shutil.move(dcp_root / "step-20", dcp_root / "aside")
        probe.sample(done.site.emit)
        probe.sample(done.site.emit)
        gone = [data for kind, data in done.events if kind is Kind.EFFECT and data.get("what") == "gone"]
        assert [one["file"] for one in gone] == [done.damaged[0]["file"]]


def test_a_save_that_ends_meanwhile_is_not_hit(operate: Operate, torch_root: Path) -> None:
    """What was guarded is what is damaged, though another one is the newest by then."""
    done = operate("checkpoint.truncate", torch_root)
    done.handles = done.injector.changes(done.site)
    torch.save({"weight": torch.ones(5), "step": 30}, torch_root / "step-30.pt")
    digest = hashlib.sha256((torch_root / "step-30.pt").read_bytes()).hexdigest()
    done.injector.apply(done.site)
    assert {Path(one["file"]).name for one in done.damaged} == {"step-20.pt"}
    assert hashlib.sha256((torch_root / "step-30.pt").read_bytes()).hexdigest() == digest


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("checkpoint.flip_bits", {"bits": 0}),
        ("checkpoint.nan", {"newest": 0}),
        ("checkpoint.truncate", {"keep": 1.5}),
        ("checkpoint.zero_block", {"bytes": 0}),
        ("storage.full", {"left": -1}),
        ("storage.slow", {"rate": 0.0}),
        ("storage.slow", {"ranks": [1]}),
    ],
)
def test_parameters_out_of_range(name: str, given: dict[str, Any]) -> None:
    """A number that makes no sense, or a field that is no scenario's to fill, is refused where it stands."""
    told: list[Any] = []
    assert check_parameters(registry.injectors()[name], given, ("with",), lambda *said: told.append(said)) == {}
    assert [said[0] for said in told] == [("with", *given)]
