"""The contract of all handles, and the further duties of each kind."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker_engine
import kubectl_program
import netspace
import pytest
import slurm_programs
import toxiproxied
from waiting import wait_until

from torchaos.harness.interfaces import Handle
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.rollback.cgroup_handles import CpuCgroup, MemoryCgroup, freeze, freezer_for, starve, throttle
from torchaos.harness.rollback.file_handles import File, Mount
from torchaos.harness.rollback.handles import REGISTRY, JobProcesses, PageSlot, Process, from_json, to_json

Case = tuple[Handle, Callable[[], object]]  # the handle, and the change that it takes back


def _marks(kind: str) -> list[pytest.MarkDecorator]:
    if kind in netspace.KINDS:
        return [netspace.NEEDS]
    if kind.endswith("_cgroup"):
        return [pytest.mark.needs("freezer")]
    if kind in docker_engine.KINDS:
        return [pytest.mark.system]
    return [pytest.mark.needs("root")] if kind == "mount" else []


@pytest.fixture(
    params=[pytest.param(kind, marks=_marks(kind)) for kind in (*sorted(REGISTRY), "process/end", "file/new")]
)
def case(request: pytest.FixtureRequest, tmp_path: Path, spawn: Any) -> Iterator[Case]:
    """One case or more for each kind; a kind without one fails here."""
    if request.param in docker_engine.KINDS:
        yield from docker_engine.in_engine(request.param, request.getfixturevalue("docker_engine"))
    elif request.param == "toxic":
        yield from toxiproxied.on_a_proxy(tmp_path)
    elif request.param == "kubernetes_objects":
        yield from kubectl_program.on_a_cluster(tmp_path)
    elif request.param == "kubernetes_agent":
        yield from kubectl_program.attached(tmp_path)
    elif request.param == "kubernetes_node":
        yield from kubectl_program.closed(tmp_path)
    elif request.param == "slurm_work":
        yield from slurm_programs.on_a_cluster(tmp_path)
    elif request.param == "slurm_node":
        yield from slurm_programs.out_of_service(tmp_path)
    else:
        yield _case(request, tmp_path, spawn)


def _case(request: pytest.FixtureRequest, tmp_path: Path, spawn: Any) -> Case:
    made = hashlib.sha256(b"fault").hexdigest()
    sleeper = spawn(start_new_session=True, env={ENV_RUN_ID: f"contract-{os.getpid()}"})
    file, new, page = tmp_path / "data", tmp_path / "new", tmp_path / "fault.page"
    file.write_text("good")
    ControlPage(page, create=True).close()
    cases: dict[str, Callable[[], Case]] = {
        "process": lambda: (Process.of(sleeper.pid, "resume"), lambda: _stop(sleeper.pid)),
        "process/end": lambda: (Process.of(sleeper.pid, "end"), lambda: None),
        "job_processes": lambda: (JobProcesses(f"contract-{os.getpid()}"), lambda: None),
        "file": lambda: (File.of(file, tmp_path, tmp_path), lambda: _write(file, "bad")),
        "file/new": lambda: (
            File.of(new, tmp_path, tmp_path, made),
            lambda: _write(new, "fault"),
        ),
        "page_slot": lambda: (PageSlot(str(page)), lambda: _arm(page)),
        "cpu_cgroup": lambda: _grouped(
            CpuCgroup.to_make(sleeper.pid, "test"), lambda one: throttle(one, sleeper.pid, 0.5)
        ),
        "freezer_cgroup": lambda: _grouped(freezer_for(sleeper.pid, "test"), lambda one: freeze(one, sleeper.pid)),
        "memory_cgroup": lambda: _grouped(
            MemoryCgroup.to_make(sleeper.pid, "test"), lambda one: starve(one, sleeper.pid, 2**30)
        ),
        "mount": lambda: (Mount.of(tmp_path, f"torchaos-{os.getpid()}"), lambda: _mount(tmp_path)),
    }
    if request.param in netspace.KINDS:
        return netspace.case_of(request.param, spawn, tmp_path)
    return cases[request.param]()


def _grouped(group: Any, change: Callable[[Any], None]) -> Case:
    return group, lambda: change(group)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _mount(path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", f"torchaos-{os.getpid()}", path], check=True)


def _arm(path: Path) -> None:
    page = ControlPage(path)
    page.write(ControlPage.ALLOWED, 3)
    page.close()


def test_json_round_trip(case: Case) -> None:
    """A handle is data: through JSON and back it is the same."""
    handle, _change = case
    assert from_json(json.loads(json.dumps(to_json(handle)))) == handle


def test_restores_and_verifies(case: Case) -> None:
    """After the change it is not restored; after `restore` it is, and restoring twice more does no harm."""
    handle, change = case
    change()
    assert not handle.is_undone()
    for _again in range(3):
        handle.undo()
        assert handle.is_undone()


def test_frozen(case: Case) -> None:
    """Nobody changes a handle after it was written down."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        case[0].kind = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "raw",
    [
        {}, {"kind": "shell", "command": "true"}, {"kind": "process", "pid": 7}, {"kind": "file", "hello": 1},
        {"kind": "process", "pid": 1, "start_ticks": 0, "action": "end"},
        {"kind": "process", "pid": 7, "start_ticks": 0, "action": "exec"},
        {"kind": "job_processes", "run_id": ""},
    ],
)  # fmt: skip
def test_refuses_what_is_no_handle(raw: dict[str, Any]) -> None:
    """What is not a handle, or would hit everything, is a ValueError and nothing else."""
    with pytest.raises(ValueError, match=r"\w"):
        from_json(raw)


def test_only_the_registry_goes_into_the_log() -> None:
    """The set is closed: a handle of somebody else's class is refused before it is written."""

    class Shell:
        kind = "process"

    with pytest.raises(ValueError, match="not one of the handles"):
        to_json(Shell())  # type: ignore[arg-type]


@pytest.mark.parametrize("action", ["resume", "end"])
def test_process_spares_another_with_its_pid(spawn: Any, state_of: Any, action: Any) -> None:
    """The same pid with another start time is a stranger: it stays as it is, and the one meant is gone."""
    stranger = spawn()
    _stop(stranger.pid)
    handle = dataclasses.replace(Process.of(stranger.pid, action), start_ticks=1)
    handle.undo()
    assert handle.is_undone()
    assert state_of(stranger.pid) == "T"


def test_process_of_an_earlier_boot(spawn: Any, state_of: Any) -> None:
    """After a reboot nothing is left of a process, even where pid and start time are some other's."""
    process = spawn()
    handle = dataclasses.replace(Process.of(process.pid, "end"), boot="another boot")
    handle.undo()
    assert handle.is_undone()
    assert state_of(process.pid) != "Z"


def test_a_zombie_is_gone(spawn: Any, state_of: Any) -> None:
    """A process that has ended and was not waited for can neither be ended nor resumed any more."""
    process = spawn("true")
    ends = [Process(process.pid, _ticks(process.pid), action) for action in ("end", "resume")]
    wait_until(lambda: state_of(process.pid), lambda state: state == "Z")
    for handle in ends:
        handle.undo()
        assert handle.is_undone()


def test_process_spares_the_executor_itself() -> None:
    """No handle ends the process that undoes or one of its ancestors."""
    handle = Process.of(os.getpid(), "end")
    with pytest.raises(ValueError, match="the process that does the undo"):
        handle.undo()
    assert not handle.is_undone()


@pytest.mark.needs("root")
def test_process_of_another_user(spawn: Any, python: Any) -> None:
    """Where the signal is not permitted, the handle says so instead of taking it for done."""
    victim = spawn()
    handle = json.dumps(to_json(Process.of(victim.pid, "end")))
    executor = python(
        "import json, os, sys\nfrom torchaos.harness.rollback.handles import from_json\n"
        "os.setgid(65534); os.setuid(65534)\nhandle = from_json(json.loads(sys.argv[1]))\n"
        "try: handle.undo()\nexcept OSError as error: print(type(error).__name__)\n"
        "print(handle.is_undone())",
        handle, stderr=sys.stderr,
    )  # fmt: skip
    said = executor.communicate()[0].split()
    assert said == ["TimeoutError", "False"]


_TREE = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
unmarked = subprocess.Popen(["sleep", "600"], env={})
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:                              # an orphan: its parent leaves at once
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
stopped = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
os.waitpid(stopped.pid, os.WUNTRACED)
print(os.getpid(), child.pid, unmarked.pid, stopped.pid, flush=True)
time.sleep(600)
"""


def test_job_processes_takes_the_whole_job(python: Any, spawn: Any, state_of: Any) -> None:
    """Children, orphans in a session of their own, stopped ones and a child without the mark: all go, others stay."""
    run_id = f"tree-{os.getpid()}"
    other = spawn(env={ENV_RUN_ID: run_id + "0"})
    job = python(_TREE, env={ENV_RUN_ID: run_id}, start_new_session=True)
    pids = [int(pid) for line in (job.stdout.readline(), job.stdout.readline()) for pid in line.split()]
    assert len(pids) == 5
    assert state_of(pids[-1]) == "T"
    handle = JobProcesses(run_id)
    assert not handle.is_undone()
    handle.undo()
    assert handle.is_undone()
    assert {state_of(pid) for pid in pids} <= {"", "Z"}
    assert state_of(other.pid) in "SR"


def test_job_processes_spares_executor_and_ancestors(python: Any) -> None:
    """An executor that carries the mark itself survives, and so do its ancestors."""
    code = (
        "import os\nfrom torchaos.harness.rollback.handles import JobProcesses\n"
        "pid = os.fork()\n"
        "if pid == 0: JobProcesses('own').undo(); print(JobProcesses('own').is_undone(), flush=True); os._exit(0)\n"
        "print(os.waitpid(pid, 0)[1], flush=True)"
    )
    executor = python(code, env={ENV_RUN_ID: "own"})
    assert executor.communicate()[0].split() == ["True", "0"]


def test_page_releases_a_held_rank(tmp_path: Path) -> None:
    """Whatever the page says, afterwards every firing may go on and none comes any more."""
    path = tmp_path / "fault.page"
    page = ControlPage(path, create=True)
    page.write(ControlPage.ALLOWED, 5)
    page.write(ControlPage.FIRED, 2)
    PageSlot(str(path)).undo()
    assert page.read(ControlPage.ALLOWED) == page.read(ControlPage.FIRED) == 2
    assert page.read(ControlPage.GO) > 10**9


def test_page_that_is_gone(tmp_path: Path) -> None:
    """A page that was never made is undone; one that was deleted is not while a process still has it mapped."""
    handle = PageSlot(str(tmp_path / "fault.page"))
    handle.undo()
    assert handle.is_undone()
    page = ControlPage(handle.path, create=True)
    os.unlink(handle.path)
    handle.undo()
    assert not handle.is_undone()
    page.close()
    assert handle.is_undone()


@pytest.mark.parametrize("size", [0, ControlPage.SIZE])
def test_page_that_was_never_finished(tmp_path: Path, size: int) -> None:
    """A page whose maker died before it was one can hold nobody, and is left at that."""
    path = tmp_path / "fault.page"
    path.write_bytes(bytes(size))
    PageSlot(str(path)).undo()
    assert PageSlot(str(path)).is_undone()
    assert path.read_bytes() == bytes(size)


def test_page_that_is_none(tmp_path: Path) -> None:
    """A file that is no control page, or a link to one, is not written to."""
    path, link = tmp_path / "fault.page", tmp_path / "link.page"
    path.write_bytes(b"x" * ControlPage.SIZE)
    link.symlink_to(path)
    for handle in (PageSlot(str(path)), PageSlot(str(link))):
        with pytest.raises((ValueError, OSError)):
            handle.undo()
    assert path.read_bytes() == b"x" * ControlPage.SIZE


def _ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
