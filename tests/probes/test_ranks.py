"""The watch over ranks, with processes that play torchelastic's agent and its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from torchaos.harness.monitoring.probes.rank_probe import RankWatch, exit_code
from torchaos.harness.protocol.wire import Event, Kind, start_ticks
from torchaos.harness.record.events.journal import Journal

AGENT = """
import os, subprocess, sys
code, ranks = sys.argv[1], int(sys.argv[2])
env = {**os.environ, "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(ranks)}
envs = [{**env, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(ranks)]
some = [subprocess.Popen([sys.executable, "-c", code], env=one) for one in envs]
print(*(one.pid for one in some), flush=True)
sys.stdin.read()
for one in some:
    one.kill()
    one.wait()
"""  # fmt: skip
SLEEP = "import time; time.sleep(600)"
EXIT_7 = """
import os, time
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.01)
raise SystemExit(7)
"""
STUCK = """
import os, sys
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.environ["FIFO"], os.O_RDONLY, 0)])
import time; time.sleep(600)
"""


class Stage:
    """A journal and a watch; agents whose workers run `code`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.journal, self._stack = Journal(folder), stack
        self.watch = RankWatch(self.journal, mark=None)
        stack.callback(self.journal.close)
        stack.callback(self.watch.stop)
        self.watch.start()

    def agent(self, code: str, ranks: int = 1, **env: str) -> list[int]:
        """The pids of its workers."""
        process = subprocess.Popen(
            [sys.executable, "-c", AGENT, code, str(ranks)], env={**os.environ, **env}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin
        assert process.stdout
        for close in (process.stdout.close, process.wait, process.stdin.close):  # in reverse
            self._stack.callback(close)
        self.watch.add_root(process.pid)
        return [int(pid) for pid in process.stdout.readline().split()]

    def event(self, kind: Kind, fits: Callable[[Event], bool] = lambda _event: True) -> Event:
        found: Event = wait_until(
            lambda: next((event for event in self.told(kind) if fits(event)), None), bool, 20.0, self.journal.snapshot
        )
        return found

    def told(self, kind: Kind) -> list[Event]:
        return [event for event in self.journal.snapshot() if event.kind is kind]


def _of(pid: int) -> Callable[[Event], bool]:
    return lambda event: event.data["pid"] == pid


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(tmp_path, stack)


def test_a_rank_is_told_when_it_is_up_and_when_it_is_gone(stage: Stage) -> None:
    """Both events carry the pid and its start time; the exit code is the signal's number, negative."""
    (pid,) = stage.agent(SLEEP)
    up = stage.event(Kind.RANK_UP)
    assert (up.rank, up.attempt, up.data["pid"], up.data["start_ticks"]) == (0, 0, pid, start_ticks(pid))
    assert stage.watch.ranks()[0].pid == pid
    os.kill(pid, signal.SIGABRT)
    gone = stage.event(Kind.RANK_EXITED)
    assert (gone.data["pid"], gone.data["exit_code"]) == (pid, -6)
    assert stage.watch.ranks() == {}


def test_a_zombie_that_nobody_reaps_is_gone(stage: Stage, tmp_path: Path) -> None:
    """The stand-in agent reaps its workers only at the end: they are told as gone, once, all the same."""
    go = tmp_path / "go"
    pids = stage.agent(EXIT_7, ranks=3, GO=str(go))
    stage.event(Kind.RANK_UP, lambda _event: len(stage.watch.ranks()) == 3)
    go.touch()
    for pid in pids:
        assert stage.event(Kind.RANK_EXITED, _of(pid)).data["exit_code"] == 7
    (pid,) = stage.agent(SLEEP)
    stage.event(Kind.RANK_UP, _of(pid))
    assert len(stage.told(Kind.RANK_EXITED)) == 3


def test_the_members_are_those_of_now(stage: Stage) -> None:
    """A process that was born or has ended since the last scan is counted, or not, without a wait."""
    stage.watch.add_root(os.getpid())
    wait_until(stage.watch.members, lambda members: os.getpid() in members, 20.0)
    process = subprocess.Popen([sys.executable, "-c", SLEEP])
    assert stage.watch.members()[process.pid] == start_ticks(process.pid)
    process.kill()
    process.wait()
    assert process.pid not in stage.watch.members()


def test_a_rank_that_is_stuck_in_the_kernel_is_told(stage: Stage, tmp_path: Path) -> None:
    """A wait that can't be interrupted shows as state D, and its end as another state."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    stage.agent(STUCK, FIFO=str(fifo))
    assert stage.event(Kind.RANK_STATE).data["state"] == "D"
    os.close(os.open(fifo, os.O_WRONLY))
    stage.event(Kind.RANK_STATE, lambda event: event.data["state"] in "RS")


def test_two_agents_with_the_same_ranks_are_ambiguous(stage: Stage) -> None:
    """With two candidates for rank 0 it is unknown, a note says which, and the clear rank 1 stays known."""
    first = stage.agent(SLEEP, ranks=2)
    stage.event(Kind.RANK_UP, lambda event: event.rank == 1)
    second = stage.agent(SLEEP)
    text = stage.event(Kind.NOTE).data["text"]
    assert text.startswith(f"pids {first[0]} and {second[0]} could each be rank 0")
    assert set(stage.watch.ranks()) == {1}


def test_a_false_witness_is_told(stage: Stage) -> None:
    """What the event log says of a pid is compared with /proc, and the difference noted; a true word is not."""
    (pid,) = stage.agent(SLEEP)
    stage.event(Kind.RANK_UP)
    for rank, local in ((0, pid), (5, os.getpid())):
        data: dict[str, Any] = {"state": "START", "pid": local}
        stage.journal.emit(Kind.ELASTIC_WORKER, data, rank=rank, attempt=0)
    assert f"pid {os.getpid()} is rank 5" in stage.event(Kind.NOTE).data["text"]
    assert len(stage.told(Kind.NOTE)) == 1


def test_the_exit_code_of_a_process_that_was_reaped() -> None:
    """Linux 6.15 and later keep it with the pidfd; earlier ones don't, and then it is not made up."""
    process = subprocess.Popen([sys.executable, "-c", SLEEP])
    ticks, fd = start_ticks(process.pid), os.pidfd_open(process.pid)
    assert ticks
    process.kill()
    process.wait()
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert exit_code(process.pid, ticks, fd) == (-9 if release >= (6, 15) else None)
    os.close(fd)


def test_the_watch_costs_little(stage: Stage) -> None:
    """Watching four ranks takes under 2 % of a core."""
    stage.agent(SLEEP, ranks=4)
    stage.event(Kind.RANK_UP, lambda event: len(stage.watch.ranks()) == 4)
    thread = next(one.native_id for one in threading.enumerate() if one.name == "ranks")
    assert thread
    before, start = cpu_s(thread), time.monotonic()
    threading.Event().wait(2.0)
    assert (cpu_s(thread) - before) / (time.monotonic() - start) < 0.02


def cpu_s(thread: int) -> float:
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
