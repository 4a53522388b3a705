"""The reaper as a whole: real processes, real deaths."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from torchaos.harness.interfaces import Irreversible, UsageError
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.rollback import undo_log
from torchaos.harness.rollback.file_handles import File
from torchaos.harness.rollback.handles import JobProcesses, PageSlot, Process
from torchaos.harness.rollback.reaper import Reaper, UndoExecutor
from torchaos.harness.rollback.reaper_client import ReaperClient, UndoError, undo_from_log
from torchaos.harness.rollback.undo_log import State, path_of, read

STAND_IN = Path(__file__).with_name("stand_in.py")
RUNS = ("R", "S", "D")  # states of a process that is neither stopped nor gone


@pytest.fixture
def reaper(run_dir: Path) -> Iterator[ReaperClient]:
    with ReaperClient.start(run_dir, "test") as started:
        yield started


def _states(run_dir: Path) -> dict[str, State]:
    return {record.id: record.state for record in read(run_dir)[0]}


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def test_guarded_is_on_disk(reaper: ReaperClient, run_dir: Path, spawn: Any) -> None:
    """When `guard` returns, the way back can be read from the log."""
    handle = Process.of(spawn().pid, "resume")
    reaper.record_undo("a", [handle], owner="x", limit_s=60.0)
    line = json.loads(path_of(run_dir).read_bytes().splitlines()[-1])
    assert (line["record"], line["state"], line["handles"][0]["pid"]) == ("a", "planned", handle.pid)


@pytest.mark.needs("strace")
def test_guard_is_fsynced_before_it_is_acknowledged(run_dir: Path, spawn: Any) -> None:
    """The answer leaves the reaper after the fsync and not before it."""
    trace = run_dir / "trace"
    with ReaperClient.start(run_dir, "test") as reaper:
        tracer = spawn("strace", "-f", "-o", str(trace), "-e", "trace=fsync,pwrite64,sendto", "-p", str(reaper.pid),
                       stderr=subprocess.PIPE)  # fmt: skip
        assert "attached" in tracer.stderr.readline()
        reaper.record_undo("a", [JobProcesses("none")], owner="x")
    tracer.wait(300)
    tracer.stderr.close()
    calls = [line.split("(")[0].split()[-1] for line in trace.read_text().splitlines() if "(" in line]
    assert calls[:3] == ["pwrite64", "fsync", "sendto"]


def test_heals_an_owner_and_leaves_the_rest(reaper: ReaperClient, run_dir: Path, spawn: Any, state_of: Any) -> None:
    """Undoing one fault leaves another one on; what is undone is told once."""
    first, second = spawn(), spawn()
    for name, process in (("a", first), ("b", second)):
        reaper.record_undo(name, [Process.of(process.pid, "resume")], owner=name)
        reaper.mark(name, "maybe_applied")
        _stop(process.pid)
        reaper.mark(name, "applied")
    assert [(each.record, each.verified) for each in reaper.undo("a")] == [("a", True)]
    assert state_of(first.pid) in RUNS
    assert state_of(second.pid) == "T"
    assert reaper.undo("a") == []
    assert _states(run_dir) == {"a": State.VERIFIED, "b": State.APPLIED}
    assert [each.record for each in reaper.undo(None)] == ["b"]


def test_time_limit(reaper: ReaperClient, run_dir: Path, spawn: Any, state_of: Any) -> None:
    """A fault that nobody takes back is taken back when its time is over, and told at the next occasion."""
    victim = spawn()
    reaper.record_undo("a", [Process.of(victim.pid, "resume")], owner="x", limit_s=0.2)
    _stop(victim.pid)
    wait_until(lambda: _states(run_dir)["a"], lambda state: state == State.VERIFIED)
    assert state_of(victim.pid) in RUNS
    with pytest.raises(UndoError, match="undone already"):
        reaper.mark("a", "maybe_applied")
    _stop(victim.pid)
    with pytest.raises(UndoError, match="undone already"):
        reaper.mark("a", "applied")
    wait_until(lambda: state_of(victim.pid) in RUNS)
    assert [each.verified for each in reaper.undo("x")] == [True]


def test_time_limit_of_a_fault_that_has_been_applied(reaper: ReaperClient, spawn: Any, state_of: Any) -> None:
    """A fault may wait long for its trigger and then last but shortly: the limit is counted again from there."""
    victim = spawn()
    reaper.record_undo("a", [Process.of(victim.pid, "resume")], owner="x", limit_s=600.0)
    _stop(victim.pid)
    reaper.mark("a", "applied", limit_s=0.1)
    wait_until(lambda: state_of(victim.pid) in RUNS)


def test_what_is_lost_is_known_at_once(run_dir: Path) -> None:
    """Long after the guard, and without another request: whoever asks before a fault is told that it is gone."""
    with ReaperClient.start(run_dir, "test") as reaper:
        reaper.check()
        os.kill(reaper.pid, signal.SIGKILL)

        def gone() -> bool:
            with suppress(UndoError):
                reaper.check()
                return False
            return True

        wait_until(gone)


def test_irreversible(reaper: ReaperClient, run_dir: Path) -> None:
    """What can't be undone has a record that says why, and undoing leaves it at that."""
    reaper.record_undo("kill", Irreversible("a dead rank can't be brought back"), owner="kill", limit_s=0.0)
    assert reaper.undo("kill") == []
    assert read(run_dir)[0][0].irreversible == "a dead rank can't be brought back"


def test_guard_needs_a_way_back(reaper: ReaperClient) -> None:
    """A fault that says nothing about its undo is refused, and so is a record that is guarded twice."""
    with pytest.raises(UsageError, match="no reason"):
        reaper.record_undo("a", [], owner="x")
    with pytest.raises(UsageError, match="no reason"):
        reaper.record_undo("a", Irreversible(""), owner="x")
    reaper.record_undo("a", [JobProcesses("none")], owner="x")
    with pytest.raises(UndoError, match="in the log already"):
        reaper.record_undo("a", [JobProcesses("none")], owner="x")
    with pytest.raises(UndoError, match="no undo in the log"):
        reaper.mark("b", "applied")


def test_what_cannot_be_verified_is_said(reaper: ReaperClient, run_dir: Path) -> None:
    """A undo that fails comes back with a reason, and stays open in the log."""
    (run_dir / "page").write_text("no page")
    reaper.record_undo("a", [PageSlot(str(run_dir / "page"))], owner="x")
    (undone,) = reaper.undo("x")
    assert (undone.verified, "64 bytes" in undone.reason) == (False, True)
    assert _states(run_dir) == {"a": State.FAILED}
    (run_dir / "page").unlink()
    assert [each.verified for each in reaper.undo("x")] == [True]


def test_eight_threads(reaper: ReaperClient, run_dir: Path) -> None:
    """One thread per fault: eight at once guard, mark and undo, and each gets its own answers."""
    problems: list[object] = []

    def work(thread: int) -> None:
        try:
            for number in range(10):
                name = f"{thread}-{number}"
                reaper.record_undo(name, [JobProcesses(f"none-{name}")], owner=name)
                reaper.mark(name, "applied")
                undone = reaper.undo(name)
                if [each.handle["run_id"] for each in undone] != [f"none-{name}"]:
                    problems.append(undone)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert problems == []
    assert list(_states(run_dir).values()) == [State.VERIFIED] * 80


def test_signals_do_not_end_it(reaper: ReaperClient) -> None:
    """Ctrl-C, a hang-up and a polite kill are for the harness; the reaper, in a session of its own, ignores them."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(reaper.pid, number)
    reaper.record_undo("a", [JobProcesses("none")], owner="x")
    assert os.getsid(reaper.pid) == reaper.pid
    assert os.readlink(f"/proc/{reaper.pid}/cwd") == "/"


def test_close_leaves_no_process(run_dir: Path, spawn: Any, state_of: Any) -> None:
    """`close` undoes what is left and the reaper is gone and waited for; closing twice is nothing."""
    victim = spawn()
    reaper = ReaperClient.start(run_dir, "test")
    reaper.record_undo("a", [Process.of(victim.pid, "resume")], owner="x")
    _stop(victim.pid)
    assert [each.verified for each in reaper.close()] == [True]
    assert state_of(victim.pid) in RUNS
    assert state_of(reaper.pid) == ""
    assert reaper.close() == []


def test_the_reaper_dies(run_dir: Path, spawn: Any, state_of: Any) -> None:
    """Without its reaper the harness guards nothing more, and undoes by itself from the log."""
    victim = spawn()
    with ReaperClient.start(run_dir, "test") as reaper:
        reaper.record_undo("a", [Process.of(victim.pid, "resume")], owner="x")
        _stop(victim.pid)
        os.kill(reaper.pid, signal.SIGKILL)
        wait_until(lambda: state_of(reaper.pid), lambda state: state == "Z")
        with pytest.raises(UndoError, match="reaper is gone"):
            reaper.record_undo("b", [JobProcesses("none")], owner="x")
        assert [(each.record, each.verified) for each in reaper.undo("x")] == [("a", True)]
        assert state_of(victim.pid) in RUNS
    assert _states(run_dir) == {"a": State.VERIFIED}


def test_the_reaper_hangs(run_dir: Path, spawn: Any, state_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reaper that does not answer is ended, so that two never undo at once, and the harness undoes by itself."""
    victim = spawn()
    with ReaperClient.start(run_dir, "test") as reaper:
        reaper.record_undo("a", [Process.of(victim.pid, "resume")], owner="x")
        _stop(victim.pid)
        os.kill(reaper.pid, signal.SIGSTOP)
        monkeypatch.setattr("torchaos.harness.rollback.reaper_client.ANSWER_S", 0.3)
        with pytest.raises(UndoError, match="did not answer"):
            reaper.record_undo("b", [JobProcesses("none")], owner="x")
        assert state_of(reaper.pid) == ""
        assert [(each.record, each.verified) for each in reaper.undo(None)] == [("a", True)]
    assert state_of(victim.pid) in RUNS


def test_the_reaper_and_the_run_directory_are_gone(run_dir: Path, spawn: Any, state_of: Any) -> None:
    """Even without log and reaper the harness still knows what it guarded."""
    victim = spawn()
    with ReaperClient.start(run_dir, "test") as reaper:
        reaper.record_undo("a", [Process.of(victim.pid, "resume")], owner="x")
        _stop(victim.pid)
        os.kill(reaper.pid, signal.SIGKILL)
        run_dir.rename(run_dir.with_name("moved"))
        assert [each.verified for each in reaper.undo(None)] == [True]
    assert state_of(victim.pid) in RUNS


def test_run_directory_deleted(run_dir: Path, spawn: Any, state_of: Any) -> None:
    """A reaper whose log was deleted undoes what it has in memory."""
    victim = spawn()
    with ReaperClient.start(run_dir, "test") as reaper:
        reaper.record_undo("a", [Process.of(victim.pid, "resume")], owner="x")
        _stop(victim.pid)
        run_dir.rename(run_dir.with_name("moved"))
        assert [each.verified for each in reaper.undo(None)] == [True]
    assert state_of(victim.pid) in RUNS


def test_log_that_cannot_be_had(run_dir: Path) -> None:
    """Where there can be no log there is no reaper, and the error says which run and why."""
    path_of(run_dir).mkdir()
    with pytest.raises(UndoError, match=r"not ready.*directory"):
        ReaperClient.start(run_dir, "test")
    with pytest.raises(UndoError, match="can't be started"):
        ReaperClient.start(run_dir / "missing", "test")


def test_reaper_that_dies_before_it_is_ready(run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Killed when its entry in the registry is made and nobody has been told, it leaves no entry behind."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if any('rollback.reaper' in word for word in sys.orig_argv):\n"
        "    def look(event, about):\n"
        "        if event == 'open' and os.path.exists(os.path.join(str(about[0]), 'run.json')):\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "    sys.addaudithook(look)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(UndoError, match="not ready"):
        ReaperClient.start(run_dir, "test")
    assert undo_log.entries() == ([], [])


@pytest.mark.needs("root")
def test_disk_full(tmp_path: Path, spawn: Any, state_of: Any) -> None:
    """On a full disk `guard` raises, what was guarded before is undone, and with room again it goes on."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], check=True)
    try:
        run_dir, victim = mount / "run", spawn()
        run_dir.mkdir()
        with ReaperClient.start(run_dir, "test") as reaper:
            reaper.record_undo("a", [Process.of(victim.pid, "resume")], owner="x")
            _stop(victim.pid)
            with suppress(OSError), open(mount / "filler", "wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
            with pytest.raises(UndoError, match=r"No space|no room"):
                reaper.record_undo("b", [JobProcesses("x" * 5000)], owner="x")
            assert [(each.record, each.verified) for each in reaper.undo("x")] == [("a", True)]
            assert state_of(victim.pid) in RUNS
            (mount / "filler").unlink()
            reaper.record_undo("c", [JobProcesses("none")], owner="x")
        records, damaged = read(run_dir)
        assert ({record.id for record in records}, damaged) == ({"a", "c"}, [])
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def machine(run_dir: Path, spawn: Any) -> tuple[Path, str, int]:
    """What the stand-in harness will change: a file, and a process that is not the job's."""
    (run_dir / "job").mkdir()
    (run_dir / "job" / "data").write_text("good")
    return run_dir, f"death-{os.getpid()}-{run_dir.parent.name}", spawn().pid


def _assert_clean(run_dir: Path, run_id: str, victim: int, state_of: Any) -> None:
    assert JobProcesses(run_id).is_undone(), "a process of the job is left"
    assert state_of(victim) in RUNS, "the victim is still stopped"
    assert (run_dir / "job" / "data").read_text() == "good"
    assert PageSlot(str(run_dir / "fault.page")).is_undone() or not (run_dir / "fault.page").exists()
    if path_of(run_dir).exists():
        assert set(_states(run_dir).values()) <= {State.VERIFIED}


@pytest.mark.parametrize("point", ["before guard", "after guard", "after apply", "after undo"])
def test_the_harness_dies(machine: tuple[Path, str, int], spawn: Any, state_of: Any, point: str) -> None:
    """SIGKILL to the harness, wherever it is: the reaper undoes everything and leaves."""
    run_dir, run_id, victim = machine
    harness = spawn(sys.executable, str(STAND_IN), str(run_dir), run_id, str(victim), point)
    reaper = json.loads(harness.stdout.readline())["reaper"]
    assert harness.stdout.readline().strip() == point
    harness.kill()
    wait_until(lambda: state_of(reaper) in ("", "Z"))
    _assert_clean(run_dir, run_id, victim, state_of)


@pytest.mark.parametrize("lines", range(1, 10))
def test_the_harness_dies_at_any_line(machine: tuple[Path, str, int], spawn: Any, state_of: Any, lines: int) -> None:
    """SIGKILL to the harness as soon as its undo log has so many lines, in the middle of undoing too."""
    run_dir, run_id, victim = machine
    harness = spawn(sys.executable, str(STAND_IN), str(run_dir), run_id, str(victim), "never")
    log = path_of(run_dir)
    wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= lines)
    harness.kill()
    reaper = json.loads(log.read_bytes().splitlines()[0])["reaper"][0]
    wait_until(lambda: state_of(reaper) in ("", "Z"))
    _assert_clean(run_dir, run_id, victim, state_of)


def test_the_harness_dies_during_a_heal(run_dir: Path, python: Any, spawn: Any, state_of: Any) -> None:
    """A undo that is under way when the harness dies is finished, and the rest is undone after it."""
    (run_dir / "data").write_text("good")
    fifo, victim = run_dir / "fifo", spawn()
    os.mkfifo(fifo)
    harness = python(
        "import os, signal, sys\nfrom dataclasses import replace\nfrom pathlib import Path\n"
        "from torchaos.harness.rollback.reaper_client import ReaperClient\n"
        "from torchaos.harness.rollback.file_handles import File\n"
        "from torchaos.harness.rollback.handles import Process\n"
        "run_dir, victim = Path(sys.argv[1]), int(sys.argv[2])\nreaper = ReaperClient.start(run_dir, 'test')\n"
        "reaper.record_undo('stop', [Process.of(victim, 'resume')], owner='stop')\n"
        "handle = File.of(run_dir / 'data', run_dir, run_dir / 'undo')\n"
        "reaper.record_undo('slow', [replace(handle, copy=str(run_dir / 'fifo'))], owner='slow')\n"
        "os.kill(victim, signal.SIGSTOP)\n(run_dir / 'data').write_text('damaged')\n"
        "print(reaper.pid, flush=True)\nreaper.undo('slow')",
        str(run_dir), str(victim.pid),
    )  # fmt: skip
    reaper = int(harness.stdout.readline())
    writers: list[int] = []

    def restoring() -> bool:
        writers.extend(_opened(fifo))
        return bool(writers)

    wait_until(restoring)
    harness.kill()
    harness.wait()
    os.write(writers[0], b"not the copy")
    _close_all(writers)
    # It is tried once more when the harness is gone, and the copy opened again.
    wait_until(lambda: (_close_all(_opened(fifo)), state_of(reaper))[1] in ("", "Z"))
    assert state_of(victim.pid) in RUNS
    assert _states(run_dir) == {"stop": State.VERIFIED, "slow": State.FAILED}


def _opened(fifo: Path) -> list[int]:
    """The fifo for writing, where somebody is reading it."""
    try:
        return [os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)]
    except OSError:
        return []


def _close_all(fds: list[int]) -> list[int]:
    for fd in fds:
        os.close(fd)
    return fds


def test_both_die(machine: tuple[Path, str, int], spawn: Any, state_of: Any) -> None:
    """With harness and reaper both dead, undoing from the log leaves the machine clean."""
    run_dir, run_id, victim = machine
    harness = spawn(sys.executable, str(STAND_IN), str(run_dir), run_id, str(victim), "after apply")
    reaper = json.loads(harness.stdout.readline())["reaper"]
    assert harness.stdout.readline().strip() == "after apply"
    os.kill(reaper, signal.SIGKILL)
    harness.kill()
    harness.wait()
    wait_until(lambda: state_of(reaper) in ("", "Z"))
    wait_until(lambda: state_of(victim), lambda state: state == "T")
    assert [each.verified for each in undo_from_log(run_dir)] == [True] * 4
    _assert_clean(run_dir, run_id, victim, state_of)
    assert undo_from_log(run_dir) == []


def test_a_forked_child_does_not_keep_the_reaper(run_dir: Path, python: Any, state_of: Any) -> None:
    """A process forked off the harness holds the socket open; the reaper sees the harness's death all the same."""
    code = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from torchaos.harness.rollback.reaper_client import ReaperClient\n"
        "reaper = ReaperClient.start(Path(sys.argv[1]), 'test')\nchild = os.fork()\n"
        "if child == 0: time.sleep(600)\nprint(reaper.pid, child, flush=True)\ntime.sleep(600)"
    )
    harness = python(code, str(run_dir), env={ENV_RUN_ID: "not the reaper's"})
    reaper, child = map(int, harness.stdout.readline().split())
    harness.kill()
    harness.wait()
    wait_until(lambda: state_of(reaper) in ("", "Z"))
    os.kill(child, signal.SIGKILL)


def test_a_harness_that_died_at_once_is_noticed(python: Any) -> None:
    """It is dead before the reaper looks, and a process that it forked holds the socket open: nobody is waited for."""
    gone = python("pass")
    gone.wait()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        watching = threading.Thread(target=Reaper(theirs, UndoExecutor(None), gone.pid).run, daemon=True)
        watching.start()
        watching.join(300)
        assert not watching.is_alive()


def test_file_and_page_end_to_end(reaper: ReaperClient, run_dir: Path) -> None:
    """Several handles of one fault go back together."""
    file, page = run_dir / "data", run_dir / "fault.page"
    file.write_text("good")
    ControlPage(page, create=True).close()
    reaper.record_undo("a", [File.of(file, run_dir, run_dir / "undo"), PageSlot(str(page))], owner="x", limit_s=60.0)
    file.write_text("bad")
    assert [(each.handle["kind"], each.verified) for each in reaper.undo("a")] == [("page_slot", True), ("file", True)]
    assert file.read_text() == "good"
