"""The undo log, and the executor that uses it, without a process."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.interfaces import Handle
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import start_ticks
from torchaos.harness.rollback import reaper
from torchaos.harness.rollback.file_handles import File
from torchaos.harness.rollback.handles import PageSlot, to_json
from torchaos.harness.rollback.network_handles import Names
from torchaos.harness.rollback.reaper import UndoExecutor
from torchaos.harness.rollback.reaper_client import UndoError, undo_from_log
from torchaos.harness.rollback.undo_log import State, UndoLog, UndoRecord, path_of, read


def _file(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    path.write_text("good")
    handle = to_json(File.of(path, folder, folder / "run" / "undo"))
    path.write_text("bad")
    return handle


def test_a_torn_last_line_is_passed_over_and_cut(run_dir: Path, tmp_path: Path) -> None:
    """Half a line at the end, as power loss leaves it, hides nothing before it and spoils nothing after it."""
    log = UndoLog(run_dir)
    log.append(UndoRecord("a", "x", [_file(tmp_path, "a")]).to_line())
    log.close()
    with open(path_of(run_dir), "ab") as file:
        file.write(b'{"record":"b","state":"pla')
    assert [record.id for record in read(run_dir)[0]] == ["a"]
    assert [each.verified for each in undo_from_log(run_dir)] == [True]
    assert (tmp_path / "a").read_text() == "good"
    assert [json.loads(line)["state"] for line in path_of(run_dir).read_bytes().splitlines()] == [
        "planned", "rolled_back", "verified",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line", [b"\x00\xff", b"[]", b'{"record":"z","state":"applied"}', b'{"record":[],"state":"planned"}']
)
def test_a_damaged_line_is_said(run_dir: Path, tmp_path: Path, line: bytes) -> None:
    """A whole line that can't be read may have been a way back: the rest is undone, and the verdict is not clean."""
    path_of(run_dir).write_bytes(line + b"\n")
    log = UndoLog(run_dir)
    log.append(UndoRecord("a", "x", [_file(tmp_path, "a")]).to_line())
    log.close()
    undone = undo_from_log(run_dir)
    assert [(each.record, each.verified) for each in undone] == [("a", True), ("?", False)]
    assert "line 1" in undone[-1].reason


@pytest.mark.parametrize("kind", ["file", "page_slot", "names"])
def test_a_log_that_names_what_is_not_the_runs(run_dir: Path, tmp_path: Path, kind: str) -> None:
    """Damaged, it may name anything: what no handle of this run can be about is left alone, and said."""
    (tmp_path / "copies").mkdir()
    page, text, me = ControlPage(tmp_path / "other.page", create=True), tmp_path / "names", os.getpid()
    page.write(page.ALLOWED, 1)
    text.write_text("another's")
    (tmp_path / "data").write_text("good")
    file = File.of(tmp_path / "data", tmp_path, tmp_path / "copies")
    (tmp_path / "data").write_text("newer")
    handles: dict[str, Handle] = {"file": file, "page_slot": PageSlot(str(tmp_path / "other.page")),
               "names": Names(me, start_ticks(me) or 0, str(text), "mine")}  # fmt: skip
    log = UndoLog(run_dir)
    log.append(UndoRecord("a", "x", [to_json(handles[kind])]).to_line())
    log.close()
    (undone,) = undo_from_log(run_dir)
    assert not undone.verified
    assert "outside the run directory" in undone.reason
    assert ((tmp_path / "data").read_text(), text.read_text(), page.read(page.ALLOWED)) == ("newer", "another's", 1)


def test_one_writer(run_dir: Path) -> None:
    """While one process has the log no other undoes from it."""
    log = UndoLog(run_dir)
    with pytest.raises(BlockingIOError, match="another process"):
        UndoLog(run_dir)
    log.close()
    UndoLog(run_dir).close()


def test_a_link_is_no_log(run_dir: Path, tmp_path: Path) -> None:
    """A link in the log's place is refused with a sentence: it could lead to anybody's instructions."""
    (tmp_path / "elsewhere").write_text("")
    path_of(run_dir).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UndoError, match="nothing can be undone"):
        undo_from_log(run_dir)


def test_nothing_guarded(tmp_path: Path) -> None:
    """A run that never guarded anything, or is gone, has nothing to undo."""
    assert undo_from_log(tmp_path / "gone") == []


def test_reverse_order(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last record is undone first, and in a record the last handle."""
    order: list[str] = []
    restore = File.undo

    def noted(handle: File) -> None:
        order.append(Path(handle.path).name)
        restore(handle)

    monkeypatch.setattr(File, "undo", noted)
    executor = UndoExecutor(None)
    executor.record_undo(UndoRecord("1", "x", [_file(tmp_path, "a"), _file(tmp_path, "b")]))
    executor.record_undo(UndoRecord("2", "x", [_file(tmp_path, "c")]))
    assert [each.verified for each in executor.undo(None, "")] == [True] * 3
    assert order == ["c", "b", "a"]


def test_a_restore_that_hangs_is_left_behind(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One restore that never ends is said to hang, and the others are undone."""
    monkeypatch.setattr(reaper, "BOUND_S", 0.3)
    hanging = _file(tmp_path, "a")
    os.mkfifo(tmp_path / "fifo")  # whoever opens it waits for a writer
    hanging["copy"] = str(tmp_path / "fifo")
    worker = UndoExecutor(UndoLog(run_dir))
    worker.record_undo(UndoRecord("1", "x", [_file(tmp_path, "b")]))
    worker.record_undo(UndoRecord("2", "x", [hanging, _file(tmp_path, "c")]))
    undone = {Path(each.handle["path"]).name: each for each in worker.undo("x", "")}
    assert {name: each.verified for name, each in undone.items()} == {"a": False, "b": True, "c": True}
    assert "hung" in undone["a"].reason
    assert {record.id: record.state for record in read(run_dir)[0]} == {"1": State.VERIFIED, "2": State.FAILED}
    os.close(os.open(tmp_path / "fifo", os.O_WRONLY))  # the thread that was left behind goes on, and ends


def test_heals_when_the_log_cannot_be_written(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk keeps new faults out, not old ones on."""
    worker = UndoExecutor(UndoLog(run_dir))
    worker.record_undo(UndoRecord("1", "x", [_file(tmp_path, "a")]))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        worker.record_undo(UndoRecord("2", "x", [to_json(File(str(tmp_path / "new"), str(tmp_path), made="0"))]))
    monkeypatch.setattr("torchaos.harness.rollback.file_handles.os.fsync", lambda fd: None)
    assert [(each.record, each.verified) for each in worker.undo(None, "")] == [("1", True)]


def test_applied_after_its_time_was_over(tmp_path: Path) -> None:
    """A fault that lands although its record was undone in between is refused before, and undone again after."""
    path = tmp_path / "a"
    worker = UndoExecutor(None)
    (tmp_path / "run" / "undo").mkdir(parents=True)
    worker.record_undo(UndoRecord("1", "x", [_file(tmp_path, "a")]))
    assert worker.mark("1", State.MAYBE_APPLIED)
    worker.carry_out("1", "its time limit was over")
    assert not worker.mark("1", State.MAYBE_APPLIED)
    path.unlink()
    assert not worker.mark("1", State.APPLIED)
    assert [each.verified for each in worker.undo("1", "")] == [True]
    assert path.read_text() == "good"


def test_concurrent_heals_do_it_once(run_dir: Path, tmp_path: Path) -> None:
    """Two undoes of one record, as a time limit and a request make them, restore once and report once."""
    worker = UndoExecutor(UndoLog(run_dir))
    worker.record_undo(UndoRecord("1", "x", [_file(tmp_path, "a")]))
    reports: list[Any] = []
    threads = [threading.Thread(target=lambda: reports.extend(worker.undo("x", ""))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 1
    assert path_of(run_dir).read_text().count("rolled_back") == 1
