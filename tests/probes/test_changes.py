"""The journal of a run in progress learns from the kernel which files were written."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import wait_until

from torchaos.harness.host.disk import Changes
from torchaos.harness.monitoring.probes.job_log import JobLog
from torchaos.harness.protocol.wire import EventFile, Kind
from torchaos.harness.record.events import journal
from torchaos.harness.record.events.journal import Journal


def test_written_and_new_files_are_named(tmp_path: Path) -> None:
    """What was written since the last call, and nothing else; a call that is woken returns."""
    (tmp_path / "old").write_text("old")
    seen = Changes(tmp_path)
    assert seen.wait(0.0) == set()
    (tmp_path / "new").write_text("new")
    with open(tmp_path / "old", "a") as file:
        file.write("more")
    os.replace(tmp_path / "new", tmp_path / "moved")
    assert seen.wait(60.0) == {"old", "new", "moved"}
    seen.wake()
    assert seen.wait(60.0) == set()
    seen.close()


def test_changes_that_the_kernel_dropped_are_said(tmp_path: Path) -> None:
    """With too many changes since the last call, any file may have changed."""
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    seen = Changes(tmp_path)
    with open(tmp_path / "one", "wb", 0) as one, open(tmp_path / "two", "wb", 0) as two:
        for _ in range(most):
            one.write(b"1")
            two.write(b"2")
    assert seen.wait(60.0) is None
    seen.close()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """It is an error, and leaves no open file."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="inotify"):
        Changes(tmp_path / "none")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("node", [None, 1], ids=["controller", "node"])
@pytest.mark.parametrize("reported", ["", "nothing", "no watch"])
def test_events_are_seen(reported: str, node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is seen as soon as the kernel reports it, and soon if it reports nothing or allows no watch. The agent
    of a node, whose folder may hold the files of a hundred others, does not look at all of them either."""
    if reported == "nothing":
        monkeypatch.setattr(Changes, "wait", lambda self, timeout_s: set())
    elif reported == "no watch":
        monkeypatch.setattr(journal, "Changes", lambda folder: Changes(folder / "none"))
    else:
        monkeypatch.setattr(Journal, "_grown", lambda self: [])
    live = Journal(tmp_path, node=node)
    file = EventFile(tmp_path / "rank0.jsonl", "rank0", 0, 0)
    file.emit(Kind.AGENT_STARTED, {"pid": 1, "start_ticks": 1, "local_rank": 0, "world_size": 1, "python": "3.11",
                                   "torch": None, "hooks": [], "node": 1})  # fmt: skip
    for number in range(1, 4):
        file.emit(Kind.NOTE, {"text": str(number)})
        wait_until(lambda: [e.data.get("text") for e in live.snapshot()[1:]], [*map(str, range(1, number + 1))].__eq__)
    file.close()
    live.close()


def test_what_was_written_before_a_moment_is_read_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that can't wait for the follower reads the files itself; several at once read each event once."""
    monkeypatch.setattr(Journal, "_follow", lambda self: None)
    live, file = Journal(tmp_path), EventFile(tmp_path / "rank0.jsonl", "rank0", 0, 0)
    for number in range(50):
        file.emit(Kind.NOTE, {"text": str(number)})
    assert list(live.snapshot()) == []
    with ThreadPoolExecutor(4) as pool:
        for reading in [pool.submit(live.catch_up) for _ in range(4)]:
            reading.result()
    assert [event.data["text"] for event in live.snapshot()] == [*map(str, range(50))]
    file.close()
    live.close()


def test_a_worker_is_of_the_round_that_its_node_wrote_before_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a job on several nodes, the output that names a worker may be read before the file that has its round."""
    monkeypatch.setattr(Journal, "_follow", lambda self: None)
    live, file = Journal(tmp_path), EventFile(tmp_path / "node0.jsonl", "node0", None, 0)
    log = JobLog(live, None)
    log.by_round = True
    log.begin(0)
    live.listen(lambda event: log.in_round(event.data["round"]) if "round" in event.data else None)
    file.emit(Kind.ELASTIC_RENDEZVOUS, {"done": True, "round": 3, "node": 0})
    output = (Path(__file__).parents[1] / "data" / "logs" / "torchrun-restart.log").read_text()
    log.line(next(line for line in output.splitlines() if ".START" in line), 1.0)
    assert [event.attempt for event in live.snapshot() if event.kind is Kind.ELASTIC_WORKER] == [3]
    file.close()
    live.close()


def test_what_was_written_before_is_there_at_once(tmp_path: Path) -> None:
    """A resume of an exploration begins with the events before the death: if its launcher did not see them, it would
    number the attempts from 0 again."""
    old = EventFile(tmp_path / "past.jsonl", "rank0", 0, 0)
    old.emit(Kind.TORCHRUN, {"pid": 1, "start_ticks": 1, "ended": False})
    seen = Journal(tmp_path)
    assert [(event.source, event.attempt) for event in seen.snapshot()] == [("rank0", 0)]
    seen.close()
