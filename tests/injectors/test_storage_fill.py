"""storage.fill, and the file system that job.checkpoints.size makes for it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchaos.harness.fault_drivers.storage_faults import OwnDisk, room
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.file_handles import File, mounts
from torchaos.harness.rollback.handles import from_json, to_json
from torchaos.harness.rollback.reaper_client import ReaperClient
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load

from .conftest import Operation

PAGE = os.sysconf("SC_PAGE_SIZE")
SIZE = 64 * PAGE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[OwnDisk]:
    made = OwnDisk.of(tmp_path / "checkpoints", SIZE, f"test-{os.getpid()}-{tmp_path.name}")
    made.mount()
    yield made
    made.undo_handle.undo()
    assert not [one for one in mounts() if one.target == str(made.folder)]


@pytest.mark.needs("mount")
def test_it_is_of_that_size_and_its_files_stay(disk: OwnDisk) -> None:
    """More than its size does not go into it; after the run it is unmounted, and files, links and times are there."""
    assert room(disk.folder) == (SIZE, SIZE)
    (disk.folder / "step-1").mkdir()
    (disk.folder / "step-1" / "weights").write_bytes(b"w" * PAGE)
    os.utime(disk.folder / "step-1" / "weights", ns=(10**18, 10**18))
    (disk.folder / "latest").symlink_to("step-1")
    with pytest.raises(OSError, match="No space left"):
        (disk.folder / "much").write_bytes(bytes(SIZE))
    assert disk.give_back(disk.undo_handle.undo, keep=True) is None
    assert disk.undo_handle.is_undone()
    assert (disk.folder / "latest" / "weights").read_bytes() == b"w" * PAGE
    assert (disk.folder / "step-1" / "weights").stat().st_mtime_ns == 10**18
    assert [path.name for path in disk.folder.parent.iterdir()] == ["checkpoints"]


@pytest.mark.needs("mount")
def test_what_is_lost_is_said(disk: OwnDisk) -> None:
    """A file that can't be copied, a hurry, and a mount that is gone too early: each time there is a sentence."""
    (disk.folder / "weights").write_bytes(b"w")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(disk.folder / "socket"))
    assert "some files in" in str(disk.give_back(disk.undo_handle.undo, keep=True))
    assert (disk.folder / "weights").read_bytes() == b"w"
    disk.mount()
    (disk.folder / "weights").write_bytes(b"newer")
    assert "there was no time to copy" in str(disk.give_back(disk.undo_handle.undo, keep=False))
    assert "they are gone" in str(disk.give_back(disk.undo_handle.undo, keep=True))
    assert (disk.folder / "weights").read_bytes() == b"w"


@pytest.mark.needs("mount")
@pytest.mark.parametrize("left", [0, 3 * PAGE, 3 * PAGE + 1])
def test_it_fills_and_gives_back(disk: OwnDisk, left: int) -> None:
    """At most `left` bytes are free; what fits is written and what does not is refused, also to a file that was open
    before; what the job removes it can use; and all of the room comes back."""
    (disk.folder / "old").write_bytes(bytes(2 * PAGE))
    with open(disk.folder / "open", "wb", buffering=0) as file:
        one = Operation("storage.fill", disk.folder, left=left).apply()
        assert room(disk.folder)[0] == left // PAGE * PAGE
        for _ in range(left // PAGE):
            file.write(bytes(PAGE))
        with pytest.raises(OSError, match="No space left"):
            file.write(bytes(PAGE))
        (disk.folder / "old").unlink()
        assert file.write(bytes(PAGE)) == PAGE
    (probe,) = one.injector.probes(one.site)
    probe.sample(one.site.emit)
    assert len(one.events) == (left >= PAGE)  # a page is free again
    assert one.take_back()
    assert [path.name for path in disk.folder.iterdir()] == ["open"]
    assert room(disk.folder)[0] == SIZE - (left // PAGE + 1) * PAGE


@pytest.mark.needs("mount")
def test_the_ballast_is_known_again_at_every_stage(disk: OwnDisk) -> None:
    """The way back, read from disk by another process, holds before the ballast is there, while it is empty, and when
    it is whole; a file that is not ours at its place stays."""
    one = Operation("storage.fill", disk.folder)
    (handle,) = one.injector.changes(one.site)
    again = from_json(json.loads(json.dumps(to_json(handle))))
    assert isinstance(handle, File)
    for stage in (lambda: None, Path(handle.path).touch, lambda: one.injector.apply(one.site)):
        stage()
        again.undo()
        assert again.is_undone()
        assert not list(disk.folder.iterdir())
    Path(handle.path).write_text("somebody's")
    with pytest.raises(ValueError, match="there is another file now"):
        again.undo()


@pytest.mark.needs("mount")
def test_the_reaper_unmounts_when_the_harness_is_gone(tmp_path: Path) -> None:
    """The harness dies with a full file system mounted: it is unmounted, with the ballast in it."""
    run = tmp_path / "run"
    run.mkdir()
    disk = OwnDisk.of(run / "job" / "checkpoints", SIZE, f"test-{os.getpid()}-{tmp_path.name}")
    with ReaperClient.start(run, "full") as reaper:
        reaper.record_undo("checkpoints", [disk.undo_handle], owner="checkpoints")
        disk.mount()
        one = Operation("storage.fill", disk.folder)
        reaper.record_undo("fill", one.injector.changes(one.site), owner="fill")
        one.injector.apply(one.site)
    assert disk.undo_handle.is_undone()
    assert not list(disk.folder.iterdir())


def test_no_disk_of_the_machine_is_filled(tmp_path: Path) -> None:
    """Where the checkpoints lie on no file system of ours, nothing is written."""
    with pytest.raises(ChaosError, match="no file system of their own"):
        Operation("storage.fill", tmp_path).apply()
    assert not list(tmp_path.iterdir())


def _event(kind: Kind, at: float, rank: int | None = None, **data: Any) -> Event:
    return Event(kind, f"rank{rank}", int(at * 10), 0.0, at, rank, 0 if rank is not None else None, data=data)


FULL = _event(Kind.EFFECT, 2.0, fault="damage", what="room", effect="0 bytes were free", free=0)
BEGUN = _event(Kind.SAVE_BEGIN, 3.0, 1, path="/c/step-30", format="dcp")
FAILED = _event(Kind.SAVE_END, 4.0, 1, path="/c/step-30", format="dcp", ok=False)
OVER = _event(Kind.ROLLED_BACK, 5.0, fault="damage", verified=True, reason="")


@pytest.mark.parametrize(
    ("events", "felt"),
    [
        pytest.param([FULL, BEGUN, FAILED, OVER], True, id="a save failed"),
        pytest.param([FULL, BEGUN, replace(OVER, mono_s=3.5), FAILED], True, id="it failed just after the fault"),
        pytest.param([BEGUN, FAILED, OVER], False, id="there was room"),
        pytest.param([FULL, OVER], False, id="nothing was saved"),
        pytest.param([FULL, BEGUN, replace(FAILED, data={**FAILED.data, "ok": True}), OVER], False, id="it was saved"),
        pytest.param([FULL, replace(OVER, mono_s=2.5), BEGUN, FAILED], False, id="it was begun after the fault"),
        pytest.param([BEGUN, FAILED, replace(FULL, mono_s=4.5), OVER], False, id="it failed before the fault"),
        pytest.param(
            [FULL, BEGUN, _event(Kind.APPLYING, 3.5, fault="kill"), FAILED, OVER], False, id="another fault landed"
        ),
    ],
)
def test_felt_needs_both(events: list[Event], felt: bool, operate: Callable[..., Operation], tmp_path: Path) -> None:
    """Evidence is a file system that was full, seen from outside, and a save that failed then and for no other fault's
    sake."""
    record = Record.__new__(Record)
    object.__setattr__(record, "events", tuple(events))
    found = operate("storage.fill", tmp_path / "none").injector.felt(record, "damage")
    assert (found is not None) == felt
    if found:
        assert found.what == "0 bytes were free, and rank 1 could not save step-30"


def _scenario(path: Path, checkpoints: dict[str, str] | None, fault: str = "storage.fill") -> Path:
    job = {"command": "torchrun --nproc-per-node 2 train.py", "checkpoints": checkpoints}
    target = {} if fault == "storage.fill" else {"target": "all"}
    faults = [{"inject": fault, "when": {"step": 3}, **target}]
    path.write_text(yaml.safe_dump({"scenario": "x", "job": job, "faults": faults, "assert": ["completed"]}))
    return path


@pytest.mark.parametrize(
    ("checkpoints", "words"),
    [
        ({"path": "{run}/out"}, "fills the file system that job.checkpoints.size makes"),
        (None, "fills the file system that job.checkpoints.size makes"),
        ({"path": "/data/out", "size": "64MB"}, "torchaos mounts nothing outside the run's own folder"),
        ({"path": "{run}/../../out", "size": "64MB"}, "torchaos mounts nothing outside the run's own folder"),
        ({"path": "{run}", "size": "64MB"}, "torchaos mounts nothing outside the run's own folder"),
        ({"path": "{run}/out", "size": "64"}, "is not a size"),
        ({"path": "{run}/out", "size": "0B"}, "at least 1"),
        ({"path": "{run}/out", "size": "1000TB"}, "would be in memory"),
    ],
)
def test_what_can_not_be_is_refused_beforehand(tmp_path: Path, checkpoints: dict[str, str] | None, words: str) -> None:
    """A size without the run's own folder, no size, or one that no memory has: an error before anything is done."""
    path = _scenario(tmp_path / "x.yaml", checkpoints)
    with pytest.raises(UsageError, match=words):
        make_plan(load(path), path, 0)


def test_the_right_to_mount_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the plan is refused, in one sentence that says what to do; so is a job that runs already."""
    path = _scenario(tmp_path / "x.yaml", {"path": "{run}/out", "size": "8MB"})
    with pytest.raises(UsageError, match=r"a job that runs already"):
        make_plan(load(path), path, 0, attach=os.getpid())
    monkeypatch.setattr("torchaos.harness.fault_drivers.storage_faults.may_mount", lambda: False)
    with pytest.raises(UsageError, match=r"lacks mount .*unshare --user --map-root-user --mount"):
        make_plan(load(path), path, 0)
