"""Remains of earlier deaths are found and undone, wherever they are; what another process takes care of is left
alone."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from waiting import wait_until
from warm import torchaos

from torchaos.harness.cli import cli
from torchaos.harness.host import processes
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.rollback import undo_log
from torchaos.harness.rollback.orphaned_runs import LeftBehind, before_a_run, find, left_over, recover, why
from torchaos.harness.rollback.undo_log import OpenRun

STAND_IN = Path(__file__).parent / "stand_in.py"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "torchaos"


@dataclasses.dataclass
class Killed:
    """A stand-in for a harness that died after it had applied its faults, and its reaper with it."""

    run_id: str
    run_dir: Path
    victim: int
    file: Path
    harness: int
    reaper: int


@pytest.fixture
def killed(tmp_path: Path, spawn: Any, state_of: Any) -> Killed:
    run_dir, run_id, victim = tmp_path / "run", f"recover-{os.getpid()}-{tmp_path.name}", spawn()
    for folder in ("job", "undo"):
        (run_dir / folder).mkdir(parents=True, mode=0o700)
    (run_dir / "job" / "data").write_text("good")
    harness = spawn(sys.executable, str(STAND_IN), str(run_dir), run_id, str(victim.pid), "after apply")
    reaper = json.loads(harness.stdout.readline())["reaper"]
    assert harness.stdout.readline() == "after apply\n"
    os.kill(reaper, signal.SIGKILL)
    harness.kill()
    harness.wait()
    wait_until(lambda: state_of(reaper) in ("", "Z"))
    wait_until(lambda: state_of(victim.pid) == "T")  # a signal is acted on once its process is given a core
    return Killed(run_id, run_dir, victim.pid, run_dir / "job" / "data", harness.pid, reaper)


def test_heals_what_two_deaths_left(killed: Killed, state_of: Any, state: Path) -> None:
    """With harness and reaper dead, process, file, page and job are put right, and the registry is empty afterwards."""
    runs, bad = find(())
    assert ([run.run_id for run in runs], bad) == ([killed.run_id], [])
    (run,) = left_over(runs)
    done = recover(run)
    assert done.clean, why(done)
    assert {each.record for each in done.results} == {"job", "fault"}
    assert state_of(killed.victim) in "SR"
    assert killed.file.read_text() == "good"
    assert processes.family(killed.run_id) == {}
    assert list((state / "runs").iterdir()) == []
    assert before_a_run() == []


def test_heals_though_the_run_directory_is_gone(killed: Killed, state_of: Any) -> None:
    """The registry holds the undo log too: a deleted run directory takes only its own files with it."""
    shutil.rmtree(killed.run_dir)
    (done,) = (recover(run) for run in find(())[0])
    assert state_of(killed.victim) in "SR"
    assert processes.family(killed.run_id) == {}
    assert "run directory is gone" in done.note
    assert [each.handle["kind"] for each in done.results if not each.verified] == ["file"]


def test_finds_processes_by_their_mark_where_no_log_is_left(killed: Killed, state: Path, spawn: Any) -> None:
    """With neither run directory nor copy of the log the job's processes are still found and ended."""
    shutil.rmtree(killed.run_dir)
    undo_log.path_of(next((state / "runs").iterdir())).unlink()
    helper = spawn(env={ENV_RUN_ID: f"{killed.run_id}.a-helper"})
    (done,) = (recover(run) for run in find(())[0])
    assert processes.family(killed.run_id) == {}
    assert helper.wait(300) == -signal.SIGKILL
    assert done.clean, why(done)
    assert "only look for its processes" in done.note


def test_the_log_is_kept_twice_where_it_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry and the run directory lie on different file systems: deleting the one leaves the other."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "run" / "undo").mkdir(parents=True)
    undo, run = undo_log.UndoLog(tmp_path / "run"), OpenRun.of("run", tmp_path / "run", (1, 1))
    undo.header(dataclasses.asdict(run))
    place = undo_log.add(run)
    assert place is not None
    undo.keep_copy(place)
    undo.append(undo_log.UndoRecord("fault", "fault").to_line())
    undo.close()
    assert place.read_bytes() == undo_log.path_of(tmp_path / "run").read_bytes()
    shutil.rmtree(tmp_path / "run")
    assert [record.id for record in undo_log.read(run.folder)[0]] == ["fault"]


def test_after_a_reboot(killed: Killed, state: Path, state_of: Any) -> None:
    """Pids of an earlier boot are those of strangers: they are left alone; files are undone as ever."""
    for path in (next((state / "runs").iterdir()) / "run.json", undo_log.path_of(killed.run_dir)):
        path.write_text(path.read_text().replace(processes.boot_id(), "earlier-boot"))
    os.kill(killed.victim, signal.SIGSTOP)
    (done,) = (recover(run) for run in left_over(find(())[0]))
    assert done.clean, why(done)
    assert killed.file.read_text() == "good"
    assert state_of(killed.victim) == "T"


def test_by_its_folder_where_the_registry_is_lost(killed: Killed, state: Path) -> None:
    """A run directory, or a folder of them, can be named; the undo log alone is enough."""
    shutil.rmtree(state)
    for folder in (killed.run_dir, killed.run_dir.parent):
        assert [run.run_id for run in find([folder])[0]] == [killed.run_id]
    (run,), _bad = find([killed.run_dir])
    assert recover(run).clean
    assert find([killed.run_dir]) == ([], [])


def test_spares_what_is_alive(killed: Killed, state_of: Any) -> None:
    """A run whose harness or reaper lives is not left over, and is not undone when it is named."""
    (run,), _bad = find(())
    me = (os.getpid(), processes.ticks_of(os.getpid()))
    for living in (dataclasses.replace(run, harness=me), dataclasses.replace(run, reaper=me)):
        assert left_over([living]) == []
        assert not recover(living).clean
    assert state_of(killed.victim) == "T"


def test_spares_what_another_machine_left(killed: Killed, state_of: Any) -> None:
    """A home directory may be shared: a run of another machine is not judged by the pids of this one."""
    run = dataclasses.replace(find(())[0][0], host="elsewhere/0")
    assert left_over([run]) == []
    assert "recover it there" in recover(run).problem
    assert state_of(killed.victim) == "T"


def test_a_container_is_another_machine(killed: Killed) -> None:
    """Two pods of one host may share its name, its boot id and a home directory, and have equal pids: a run of one of
    them is not left over in the other."""
    ask = "from torchaos.harness.rollback.orphaned_runs import find; print(*(run.here for run in find(())[0]))"
    own = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    may = subprocess.run([*own, "true"], capture_output=True, text=True, check=False)
    if may.returncode:
        pytest.skip(f"no pid namespace of its own can be made: {may.stderr.strip()}")
    said = [subprocess.check_output([*within, sys.executable, "-c", ask], text=True) for within in ([], own)]
    assert said == ["True\n", "False\n"]


def test_refuses_what_another_process_is_healing(killed: Killed) -> None:
    """Two never undo one run at once: the second says so."""
    held = undo_log.UndoLog(killed.run_dir)
    (run,), _bad = find(())
    assert "another process is undoing" in recover(run).problem
    assert [one.clean for one in before_a_run()] == [False]  # two runs at once: it is no reason to refuse either
    held.close()
    assert recover(run).clean


def test_no_run_where_something_cannot_be_healed(killed: Killed, state: Path) -> None:
    """A file whose saved copy is rotten can't be put back: no run starts over it, and the text says which and what."""
    for copy in (killed.run_dir / "undo").glob("*.copy"):
        copy.write_text("rotten")
    with pytest.raises(LeftBehind, match=r"job/data.*has changed since it was saved.*torchaos recover"):
        before_a_run()
    assert len(list((state / "runs").iterdir())) == 1


def test_what_cannot_be_read_can_be_forgotten(killed: Killed, state: Path, spawn: Any) -> None:
    """An undo log that is none: no run starts over it, until somebody says that all is in order."""
    for folder in (killed.run_dir, next((state / "runs").iterdir())):
        undo_log.path_of(folder).unlink()
        undo_log.path_of(folder).mkdir()
    with pytest.raises(LeftBehind, match="forget"):
        before_a_run()
    shutil.rmtree(undo_log.path_of(next((state / "runs").iterdir())))
    done = CliRunner().invoke(cli, ["recover", "--forget"], catch_exceptions=False)
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, f"{killed.run_dir}: forgotten")
    assert before_a_run() == []


@pytest.mark.parametrize("spoil", ["link", "open", "garbage"])
def test_refuses_a_registry_that_is_not_ours_alone(killed: Killed, state: Path, tmp_path: Path, spoil: str) -> None:
    """A link in place of the state directory, one that others may write to, or an entry that is none: a clear problem,
    never silence."""
    if spoil == "link":
        state.rename(tmp_path / "moved")
        state.symlink_to(tmp_path / "moved")
    elif spoil == "open":
        state.chmod(0o777)
    else:
        (next((state / "runs").iterdir()) / "run.json").write_text('{"run_id": []}')
    runs, bad = find(())
    assert runs == []
    assert bad
    with pytest.raises(LeftBehind):
        before_a_run()


@pytest.mark.needs("root")
def test_refuses_another_users_run(killed: Killed, state_of: Any) -> None:
    """The run directory of somebody else is not undone by this user."""
    os.chown(killed.run_dir, 65534, 65534)
    runs, bad = find([killed.run_dir])
    assert runs == []
    assert "another user's" in bad[0].problem
    assert state_of(killed.victim) == "T"


def test_entry_of_a_run_goes_through_json() -> None:
    """What the registry says of a run is data, and comes back as it was."""
    run = OpenRun.of("run", Path("/run"), (1, 2))
    assert OpenRun.from_json(json.loads(json.dumps(dataclasses.asdict(run)))) == run
    good = dataclasses.asdict(run)
    for raw in ({}, {"run_id": 1}, {**good, "harness": None}, {**good, "boot": 3}):
        with pytest.raises(ValueError, match="entry of a run"):
            OpenRun.from_json(raw)


def test_command_line(killed: Killed, tmp_path: Path, spawn: Any) -> None:
    """`status` shows what was left, `recover` undoes it and says so, exit code 0; a second call finds nothing."""

    def command(*words: str) -> tuple[int, str]:
        done = torchaos(*words)
        return done.returncode, done.stdout + done.stderr

    code, said = command("status", "--json")
    (view,) = json.loads(said)["runs"]
    assert (code, view["life"], view["faults"], view["run_dir"]) == (0, "left", ["fault"], str(killed.run_dir))
    spawn(env={ENV_RUN_ID: killed.run_id})
    code, said = command("recover")
    assert code == 0, said
    assert f"fault: process {killed.victim}: verified" in said
    assert command("recover") == (0, "nothing was left behind\n")
    assert undo_log.entries() == ([], [])
