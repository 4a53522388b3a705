"""Warm ranks: a real parent process of a real Python, and the ranks that it forks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchaos.harness.crash_explorer import resumers
from torchaos.harness.crash_explorer.forked_ranks import ForkedResume, ForkServer, RankCommand
from torchaos.harness.crash_explorer.resume_outcomes import OutcomeClass
from torchaos.harness.crash_explorer.resume_runs import Resume, StopRule
from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.rundir import RunDir

pytestmark = pytest.mark.slow

SCRIPT = """
import atexit, os, pickle, sys
class Mine: pass
atexit.register(lambda: print("at exit", flush=True))
print(__name__, sys.argv[1:], os.environ["RANK"], os.getcwd(), os.environ.get("GONE"), flush=True)
print(pickle.loads(pickle.dumps(Mine())).__class__ is Mine, __file__ == sys.argv[0], flush=True)
import beside
print(beside.WORD, "decimal" in sys.modules, flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def rank(tmp_path: Path) -> RankCommand:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    env = {"PATH": os.environ["PATH"], "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GONE": "yes"}
    return RankCommand(sys.executable, ("-u",), "", (str(tmp_path / "train.py"), "3", "a b"), str(tmp_path), env)


@pytest.fixture
def parent(rank: RankCommand, tmp_path: Path) -> Iterator[ForkServer]:
    found = ForkServer(rank, "test-of-warm-ranks", tmp_path / "parent.log")
    yield found
    found.close()


def _ends(parent: ForkServer, *pids: int) -> dict[int, int]:
    """The exit codes of the ranks, when all have ended."""
    found: dict[int, int] = {}
    end = time.monotonic() + 60.0
    while len(found) < len(pids):
        assert time.monotonic() < end, f"only {found} have ended"
        found |= parent.ends([pid for pid in pids if pid not in found])
    return found


def test_a_forked_rank_is_like_one_that_was_started(parent: ForkServer, rank: RankCommand, tmp_path: Path) -> None:
    """The script is `__main__`, with its own arguments, environment, folder, imports, exit code and work at exit; and
    what the parent imported is there without an import."""
    assert parent.imports(["decimal"]) == ("", 1)
    env = {name: value for name, value in rank.env.items() if name != "GONE"}
    (pid,) = parent.fork([rank], [env], tmp_path / "log")
    assert _ends(parent, pid) == {pid: 3}
    assert (tmp_path / "log").read_text().splitlines() == [
        f"__main__ ['3', 'a b'] 0 {tmp_path} None", "True True", "beside True", "at exit",
    ]  # fmt: skip


def test_ranks_with_several_threads_of_openmp_can_be_forked(rank: RankCommand, tmp_path: Path) -> None:
    """With OMP_NUM_THREADS=2, the import of torch starts a thread, and a forked process would lack it. The parent
    imports torch with one thread, and each rank has the two threads of its environment."""
    Path(rank.argv[0]).write_text(
        "import torch; print(torch.get_num_threads(), torch.ones(1000, 1000).sum().item(), flush=True)"
    )
    many = replace(rank, env={**rank.env, "OMP_NUM_THREADS": "2"})
    parent = ForkServer(many, "test-of-threads", tmp_path / "parent.log")
    try:
        assert parent.imports(["torch"]) == ("", 1)
        (pid,) = parent.fork([many], [many.env], tmp_path / "log")
        assert _ends(parent, pid) == {pid: 0}, (tmp_path / "log").read_text()
    finally:
        parent.close()
    assert (tmp_path / "log").read_text().split() == ["2", "1000000.0"]


@pytest.mark.parametrize("module", [False, True])
def test_a_rank_can_be_a_new_interpreter(parent: ForkServer, rank: RankCommand, tmp_path: Path, module: bool) -> None:
    """It has nothing of what the parent has imported, and gets its own options, arguments, environment and folder."""
    assert parent.imports(["decimal"]) == ("", 1)
    (tmp_path / "train.py").write_text(
        "import os, sys; print('decimal' in sys.modules, sys.argv[1:], os.environ['RANK'], os.getcwd(), flush=True)"
    )
    one = replace(rank, module="train", argv=("train", *rank.argv[1:])) if module else rank
    (pid,) = parent.fork([one], [one.env], tmp_path / "log", new_interpreters=True)
    assert _ends(parent, pid) == {pid: 0}
    assert (tmp_path / "log").read_text().splitlines() == [f"False ['3', 'a b'] 0 {tmp_path}"]


def test_a_module_is_run_as_python_does(parent: ForkServer, rank: RankCommand, tmp_path: Path) -> None:
    """`-m` gives the script's own path as first argument, and the working directory as first place of imports."""
    module = RankCommand(rank.python, (), "train", ("train", "0"), rank.cwd, rank.env)
    (pid,) = parent.fork([module], [rank.env], tmp_path / "log")
    assert _ends(parent, pid) == {pid: 0}, (tmp_path / "log").read_text()
    assert "True True" in (tmp_path / "log").read_text()


def test_an_exception_ends_a_rank_as_it_ends_a_script(parent: ForkServer, rank: RankCommand, tmp_path: Path) -> None:
    """The traceback is in the log, and the exit code is 1; a killed rank has its signal."""
    Path(rank.argv[0]).write_text("raise ValueError('torn')\n")
    (pid,) = parent.fork([rank], [rank.env], tmp_path / "log")
    assert _ends(parent, pid) == {pid: 1}
    assert (tmp_path / "log").read_text().splitlines()[-1] == "ValueError: torn"
    Path(rank.argv[0]).write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    (pid,) = parent.fork([rank], [rank.env], tmp_path / "log")
    assert _ends(parent, pid) == {pid: -9}


@pytest.mark.parametrize(("end", "code"), [
    ("raise ValueError('torn')", 1), ("", 0), ("import sys; sys.exit()", 0), ("import sys; sys.exit(3)", 3),
    ("import sys; sys.exit('why')", 1),
])  # fmt: skip
def test_a_rank_ends_without_the_interpreter_s_teardown(
    parent: ForkServer, rank: RankCommand, tmp_path: Path, end: str, code: int
) -> None:
    """Its threads and its work at exit are waited for, and then it is gone, with its exit code: the teardown of large
    libraries took most of a resume, and could hang."""
    Path(rank.argv[0]).write_text(f"""
import atexit, threading
class Kept:
    def __del__(self): print('torn down', flush=True)
kept, others = Kept(), threading.Event()
def work():
    others.wait()
    print('thread')
threading.Thread(target=work).start()
atexit.register(print, 'at exit')
others.set()
{end}
""")
    (pid,) = parent.fork([rank], [rank.env], tmp_path / "log")
    assert _ends(parent, pid) == {pid: code}
    said = (tmp_path / "log").read_text()
    assert "thread" in said
    assert "at exit" in said
    assert "torn down" not in said


def test_ranks_meet_at_a_store_that_is_there_before_them(parent: ForkServer, rank: RankCommand, tmp_path: Path) -> None:
    """Each call starts a fresh store, without the keys of the store before, which ends. So no rank must wait until
    another one serves the store."""
    script = f"""
        import sys
        from datetime import timedelta
        sys.path = {sys.path!r}
        from torch.distributed import TCPStore
        store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timeout=timedelta(seconds=10))
        print("before", store.check(["key"]), flush=True)
        store.set("key", "value")
    """
    Path(rank.argv[0]).write_text(textwrap.dedent(script))
    ports = []
    for _ in range(2):
        ports.append(parent.store())
        one = replace(rank, argv=(rank.argv[0], str(ports[-1])))
        (pid,) = parent.fork([one], [rank.env], tmp_path / "log")
        assert _ends(parent, pid) == {pid: 0}, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().split() == ["before", "False"] * 2
    assert 0 not in ports
    with socket.socket() as late:
        assert late.connect_ex(("127.0.0.1", ports[0]))


def test_without_torch_there_is_no_store(parent: ForkServer, tmp_path: Path) -> None:
    """The ranks then make it themselves."""
    (tmp_path / "torch.py").write_text("raise ImportError")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    other = ForkServer(
        RankCommand(sys.executable, (), "", ("train.py",), str(tmp_path), env), "test-of-warm-ranks", tmp_path / "log"
    )
    try:
        assert other.store() == 0
    finally:
        other.close()


@pytest.mark.parametrize(("port", "served"), [(1234, True), (1234, False)])
def test_a_rank_is_told_who_serves_the_store(rank: RankCommand, tmp_path: Path, port: int, served: bool) -> None:
    """As torchrun's agent tells it; torch reads this name."""
    env = rank.again(port, served, "run", tmp_path, 2)
    assert (env["MASTER_PORT"], env["TORCHELASTIC_USE_AGENT_STORE"]) == ("1234", str(served))
    assert {**env, **rank.env} == env


def test_a_thread_forbids_forks(parent: ForkServer, tmp_path: Path) -> None:
    """A library that starts a thread when it is imported would lack it in a forked rank: the reason says so."""
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    parent_of = RankCommand(sys.executable, (), "", ("train.py",), str(tmp_path), {"PYTHONPATH": str(tmp_path)})
    other = ForkServer(parent_of, "test-of-warm-ranks", tmp_path / "other.log")
    try:
        why, good = other.imports(["fractions", "threaded", "decimal"])
        assert "1 thread" in why
        assert good == 1
    finally:
        other.close()


def test_a_failed_import_is_left_to_the_rank(parent: ForkServer) -> None:
    """An optional library that is not there, or one that ends the process, stops nobody."""
    assert parent.imports(["no_such_module_anywhere", "antigravity_of_no_name"]) == ("", 2)


def test_ranks_die_with_their_parent(rank: RankCommand, tmp_path: Path, spawn_until: Callable[..., None]) -> None:
    """When the parent ends, its ranks are killed: nothing is left of an exploration that died."""
    Path(rank.argv[0]).write_text("import time; print('up', flush=True); time.sleep(600)\n")
    parent = ForkServer(rank, "test-of-warm-ranks", tmp_path / "parent.log")
    (pid,) = parent.fork([rank], [rank.env], tmp_path / "log")
    ticks = processes.ticks_of(pid)
    spawn_until(lambda: (tmp_path / "log").exists() and "up" in (tmp_path / "log").read_text())
    parent.close()
    spawn_until(lambda: not processes.is_alive(pid, ticks))


def test_a_parent_that_is_gone_is_an_error(rank: RankCommand, tmp_path: Path) -> None:
    """It is said, and nobody waits for its answer."""
    parent = ForkServer(rank, "test-of-warm-ranks", tmp_path / "parent.log")
    processes.kill({parent.pid: processes.ticks_of(parent.pid)}, time.monotonic() + 30.0)
    with pytest.raises(ChaosError, match="parent of warm ranks"):
        parent.imports(["decimal"])
    parent.close()


@pytest.fixture
def spawn_until() -> Callable[..., None]:
    def wait(holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 60.0
        while not holds():
            assert time.monotonic() < end, "it never held"

    return wait


@pytest.mark.parametrize(("script", "codes"), [
    ("import sys; sys.exit(3)", [3, 3]),
    ("import os, sys; sys.exit(3 if os.environ['TORCHAOS_ATTEMPT_BASE'] == '1' else 0)", [3, 0]),
    ("pass", [0]),
])  # fmt: skip
def test_ranks_that_fail_are_started_once_more(
    parent: ForkServer, rank: RankCommand, tmp_path: Path, script: str, codes: list[int]
) -> None:
    """A second start is the next attempt, with an end of its own; there is no third one, and none after a good end."""
    Path(rank.argv[0]).write_text(script)
    folder, run_id = RunDir(tmp_path / "run").create(), "test-of-two-starts"
    assert not ForkedResume(parent, [rank], run_id, folder, StopRule(0, 3, 1), 60.0)()
    events = list(read_events(folder.events))
    ends = [(one.attempt, one.data["exit_code"]) for one in events if one.kind is Kind.RANK_EXITED]
    assert ends == list(enumerate(codes, 1))
    over = [(one.data["submission"], one.data["exit_code"]) for one in events if one.kind is Kind.JOB_EXITED]
    assert over == [(number, int(bool(code))) for number, code in enumerate(codes)]


def test_the_command_of_a_live_rank_is_read(tmp_path: Path) -> None:
    """Interpreter, options, script, arguments, folder and environment of a process, as torchrun started it."""
    (tmp_path / "train.py").write_text("print('up', flush=True); input()")
    argv = [sys.executable, "-u", "train.py", "--lr", "a b"]
    env = {**os.environ, "RANK": "1"}
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = RankCommand.of(process.pid)
        process.kill()
    assert (found.python, found.options, found.module) == (sys.executable, ("-u",), "")
    assert (found.argv, found.cwd, found.number) == (("train.py", "--lr", "a b"), str(tmp_path), 1)


def test_a_rank_that_is_no_python_is_refused() -> None:
    """Such ranks can't be forked."""
    with subprocess.Popen(["sleep", "600"]) as process:
        with pytest.raises(ValueError, match="no Python script"):
            RankCommand.of(process.pid)
        process.kill()


def test_a_comparison_that_was_interrupted_shows_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal during the comparison of the two ways ends the warm resume in the middle. Ranks can still be forked."""
    right: Any = SimpleNamespace(kind=OutcomeClass.RIGHT)
    nothing: Any = SimpleNamespace()

    class Cold:
        patience_s, on_event = 60.0, staticmethod(lambda event: None)

        def __call__(self, _state: object) -> object:
            self.on_event(Event(Kind.RANK_UP, "harness", 0, 0.0, 0.0, rank=0, data={"pid": os.getpid()}))
            return Resume(right, nothing)

    def resume(_state: object) -> object:
        warm.stop()
        return Resume(right, nothing)

    monkeypatch.setattr(
        resumers, "ForkServer", lambda *_: SimpleNamespace(imports=lambda _names: ("", 0), close=lambda: None)
    )
    monkeypatch.setattr(
        resumers, "difference", lambda _cold, _warm: "a warm resume made none of the steps of a cold one"
    )
    monkeypatch.setattr(resumers, "ResumeTrace", SimpleNamespace(of=lambda _record: None))
    command = RankCommand(sys.executable, (), "", ("train.py",), str(tmp_path), {"RANK": "0"})
    monkeypatch.setattr(RankCommand, "of", lambda _pid: command)
    runs: Any = SimpleNamespace(plan=SimpleNamespace(job=SimpleNamespace(world_size=1)), imported=tmp_path / "imported")
    cold: Any = Cold()
    warm = resumers.WarmResumes(runs, cold, 3, tmp_path)
    monkeypatch.setattr(warm, "_resume", resume)
    state: Any = None
    found = warm(state)
    assert found
    assert found.outcome is right
    assert "could not be forked" not in warm.in_words


def test_what_a_later_resume_imports_is_imported_before_the_next_one(
    rank: RankCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded run may load no checkpoint, so the parent learns from every resume. A module that can't be
    imported before a fork, because it starts a thread, and those after it are left to the ranks, which are still
    forked."""
    given: list[list[str]] = []

    def imports(names: list[str]) -> tuple[str, int]:
        given.append(names)
        if "threaded" in names:
            return "the imports started 1 threads", names.index("threaded")
        return "", len(names)

    parent = SimpleNamespace(imports=imports, close=lambda: given.append([]), pid=1)
    monkeypatch.setattr(resumers, "ForkServer", lambda *_: parent)
    nothing: Any = None
    warm = resumers.WarmResumes(nothing, nothing, 3, tmp_path)
    monkeypatch.setattr(warm, "_ranks", {0: rank})
    monkeypatch.setattr(warm, "_parent", parent)
    noted, learnt = tmp_path / "imports", []
    for names in ("decimal\nbeside\n", "decimal\nfractions\n", "colorsys\nthreaded\nqueue\n", "queue\n"):
        noted.write_text(names)
        learnt.append(warm._learn(noted))
    assert learnt == [True, True, True, False]
    assert given == [
        ["decimal"], ["fractions"], ["colorsys", "threaded", "queue"], [], ["decimal", "fractions", "colorsys"],
    ]  # fmt: skip
    assert "could not be forked" not in warm.in_words
