"""Attaching to a torchrun that somebody else started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from torchaos.harness.host import processes
from torchaos.harness.interfaces import UsageError
from torchaos.harness.monitoring.probes.job_log import JobLog
from torchaos.harness.monitoring.probes.log_adapters import AutoAdapter
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.running.launchers.local_job import AttachedJob

pytestmark = pytest.mark.job

Bench = Any  # of conftest.py, which tests can't import

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def running(bench: Bench, stranger: Start, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A torchrun with two ranks that are in their loop, with a log. The parameter, if any: how many restarts it has."""
    with (bench.folder / "their.log").open("wb") as log:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        restarts = getattr(request, "param", 0)
        command = bench.torchrun(str(bench.trainers / "linger.py"), str(bench.folder), max_restarts=restarts)
        process = stranger(*command, stdout=log, stderr=log, env=env)
    for rank in (0, 1):
        bench.wait_until(bench.up(rank).exists)
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(300)


def test_its_ranks_are_found_and_it_goes_on(bench: Bench, running: subprocess.Popen[bytes]) -> None:
    """Both ranks and the agent are found by the tree alone, and after `stop` all of them are still there."""
    job = AttachedJob(running.pid, bench.journal)
    job.start()
    ranks = bench.ranks(job)
    assert {rank: one.pid for rank, one in ranks.items()} == {rank: int(bench.up(rank).read_text()) for rank in (0, 1)}
    assert [victim.pid for victim in job.agents()] == [running.pid]
    assert not job.done
    assert job.stop() == []
    states = {processes.stat(one.pid) is not None for one in ranks.values()}
    assert (running.poll(), states) == (None, {True})


def test_a_killed_rank_and_the_end_are_seen(bench: Bench, running: subprocess.Popen[bytes]) -> None:
    """The exit of a rank comes with its code, and the job is done when torchrun is gone; its log is followed."""
    job = AttachedJob(running.pid, bench.journal, log=bench.folder / "their.log")
    job.start()
    ranks = bench.ranks(job)
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert bench.event(Kind.RANK_EXITED, pid=ranks[1].pid).data["exit_code"] == -9
    assert job.wait(300) == 1
    assert bench.event(Kind.ELASTIC_FAILURE).data == {"exit_code": -9, "local_rank": 1, "pid": ranks[1].pid}
    assert bench.event(Kind.JOB_EXITED).data["pid"] == running.pid
    job.stop()


@pytest.mark.parametrize("running", [1], indirect=True)
def test_steps_after_a_restart_belong_to_the_new_attempt(bench: Bench, running: subprocess.Popen[bytes]) -> None:
    """torchrun says nothing of a restart at its default log level; what the ranks print is still told apart."""
    log = bench.folder / "steps.log"
    log.write_text("step 1 loss 4\n")
    job = AttachedJob(running.pid, bench.journal, log=log, new_log=lambda: JobLog(bench.journal, AutoAdapter()))
    job.start()
    for attempt, step in enumerate((2, 3)):
        ranks = bench.ranks(job, attempt)
        with log.open("a") as file:
            file.write(f"step {step} loss 4\n")
        assert bench.event(Kind.LOG_STEP, step=step).attempt == attempt
        os.kill(ranks[1].pid, signal.SIGKILL)
    assert "will restart" not in (bench.folder / "their.log").read_text()
    assert [event.data["step"] for event in bench.events(Kind.LOG_STEP)] == [2, 3]
    job.stop()


def test_what_is_no_torchrun_is_refused(bench: Bench, stranger: Start, running: subprocess.Popen[bytes]) -> None:
    """A pid that is not there, another program, and a rank are refused with what to give instead."""
    rank = int(bench.up(0).read_text())
    other = stranger(sys.executable, "-c", "import time; time.sleep(600)")
    for pid, message in (
        (2**22 + 1, "there is no such process"),
        (other.pid, "is no torchelastic agent"),
        (rank, f"is a rank; give the pid of its torchrun, which is {running.pid}"),
    ):
        with pytest.raises(UsageError, match=f"^pid {pid}.*{message}"):
            AttachedJob(pid, bench.journal)


def test_a_shell_around_torchrun_points_to_it(bench: Bench, stranger: Start, tmp_path: Path) -> None:
    """The pid of a wrapper is refused with the pid of the torchrun below it."""
    shell = stranger(
        str(bench.trainers / "wrapper.sh"), *bench.torchrun(str(bench.trainers / "linger.py"), str(tmp_path))
    )
    for rank in (0, 1):
        bench.wait_until(bench.up(rank).exists)
    with pytest.raises(UsageError, match=r"the torchrun below it is (\d+)") as refused:
        AttachedJob(shell.pid, bench.journal)
    below = int(str(refused.value).rpartition(" ")[2])
    assert [child.pid for child in psutil.Process(shell.pid).children()] == [below]
    bench.go()
    assert shell.wait(300) == 0
