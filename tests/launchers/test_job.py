"""The life of a job, with real torchrun jobs of two ranks."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import Any

import pytest

from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.monitoring.probes.job_log import JobLog
from torchaos.harness.monitoring.probes.log_adapters import adapter_for
from torchaos.harness.protocol.wire import Kind

pytestmark = pytest.mark.job

Bench = Any  # of conftest.py, which tests can't import


@pytest.mark.smoke
def test_a_killed_rank_is_seen_at_once_and_the_restart_is_attempt_1(bench: Bench) -> None:
    """SIGKILL of rank 1 is reported with its pid and -9, before torchrun reports it; both ranks return as attempt 1."""
    job = bench.linger("--all-reduce", max_restarts=1)
    before = bench.ranks(job)
    os.kill(before[1].pid, signal.SIGKILL)
    exited = bench.event(Kind.RANK_EXITED, pid=before[1].pid)
    assert (exited.rank, exited.attempt, exited.data["exit_code"]) == (1, 0, -9)
    assert exited.data["start_ticks"] == before[1].start_ticks
    after = bench.ranks(job, attempt=1)
    assert not {one.pid for one in before.values()} & {one.pid for one in after.values()}
    bench.go(1)
    assert job.wait(300) == 0
    failure = bench.event(Kind.ELASTIC_FAILURE)
    assert (failure.rank, failure.data["pid"], failure.data["exit_code"]) == (1, before[1].pid, -9)
    assert exited.mono_s < failure.mono_s
    assert [event.data["exit_code"] for event in bench.events(Kind.JOB_EXITED)] == [0]
    assert not bench.events(Kind.NOTE)


def test_every_source_names_the_same_ranks(bench: Bench) -> None:
    """The pids of torchelastic's event log, of /proc and of the trainers themselves are the same, with no note."""
    job = bench.linger()
    ranks = bench.ranks(job)
    by_log = {event.rank: event.data["pid"] for event in bench.events(Kind.ELASTIC_WORKER)}
    by_itself = {rank: int(bench.up(rank).read_text()) for rank in (0, 1)}
    assert {rank: one.pid for rank, one in ranks.items()} == by_log == by_itself
    assert {one.world_size for one in ranks.values()} == {2}
    bench.go()
    assert job.wait(300) == 0
    assert not bench.events(Kind.NOTE)


def test_data_loader_workers_are_never_ranks(bench: Bench) -> None:
    """Processes that a rank started, with its environment, are not told as ranks, also when they become orphans."""
    job = bench.linger("--loader")
    ranks = bench.ranks(job)
    os.kill(ranks[1].pid, signal.SIGKILL)
    job.wait(300)
    loaders = {int(line) for line in (bench.folder / "loaders").read_text().split()}
    assert loaders & bench.left().keys(), "a killed rank leaves its data-loader workers behind"
    assert {event.data["pid"] for event in bench.events(Kind.RANK_UP)} == {one.pid for one in ranks.values()}
    assert job.ranks() == {}
    assert job.stop() == []
    assert bench.left() == {}


def test_the_trainer_below_a_wrapper_is_the_rank(bench: Bench) -> None:
    """With `--no-python wrapper.sh` the rank is the Python process that the shell waits for."""
    wrapped = (str(bench.trainers / "wrapper.sh"), sys.executable, str(bench.trainers / "linger.py"), str(bench.folder))
    job = bench.job(*bench.torchrun("--no-python", *wrapped))
    job.start()
    ranks = bench.ranks(job)
    assert {rank: one.pid for rank, one in ranks.items()} == {rank: int(bench.up(rank).read_text()) for rank in (0, 1)}
    bench.go()
    assert job.wait(300) == 0


def test_a_resubmission_goes_on_counting_attempts(bench: Bench) -> None:
    """A job that exits with 3 is submitted again as attempt 1, in a log of its own; exit 0 ends it."""
    job = bench.linger("--exit", "3", resubmit_times=3, resubmit_delay_s=0.2)
    bench.ranks(job)
    bench.go(0)
    ranks = bench.ranks(job, attempt=1)
    assert {one.attempt for one in ranks.values()} == {1}
    bench.go(1)
    assert job.wait(300) == 0
    started, exited = bench.events(Kind.JOB_STARTED), bench.events(Kind.JOB_EXITED)
    assert [(event.data["submission"], event.attempt) for event in started] == [(0, 0), (1, 1)]
    assert [(event.data["submission"], event.data["exit_code"]) for event in exited] == [(0, 1), (1, 0)]
    assert started[1].mono_s - exited[0].mono_s >= 0.2
    assert not bench.events(Kind.ELASTIC_RESTART)
    assert {event.attempt for event in bench.events(Kind.ELASTIC_WORKER) if event.data["state"] == "START"} == {0, 1}
    assert (bench.folder / "job-1.log").stat().st_size > 0


def test_a_job_is_not_resubmitted_while_it_is_stopped(bench: Bench) -> None:
    """`stop` ends the job for good, resubmissions left or not."""
    job = bench.linger(resubmit_times=9)
    bench.ranks(job)
    assert job.stop(grace_s=5.0) == []
    assert job.done
    assert len(bench.events(Kind.JOB_STARTED)) == 1
    assert bench.left() == {}


def test_a_stopped_rank_is_seen_and_seen_again(bench: Bench) -> None:
    """SIGSTOP shows as state T within a few samples, SIGCONT as its end."""
    job = bench.linger()
    rank = bench.ranks(job)[0]
    os.kill(rank.pid, signal.SIGSTOP)
    stopped = bench.event(Kind.RANK_STATE, pid=rank.pid, state="T")
    assert (stopped.rank, stopped.attempt) == (0, 0)
    os.kill(rank.pid, signal.SIGCONT)
    bench.wait_until(
        lambda: [event.data["state"] for event in bench.events(Kind.RANK_STATE)], lambda seen: len(seen) == 2
    )


def test_nothing_is_left_of_orphans_and_stopped_ranks(bench: Bench) -> None:
    """With torchrun killed and one of its orphaned workers stopped, `stop` still ends them all."""
    job = bench.linger("--loader")
    ranks = bench.ranks(job)
    agent = job.agents([0])[0]
    os.kill(ranks[1].pid, signal.SIGSTOP)
    os.kill(agent.pid, signal.SIGKILL)
    assert job.wait(300) == -9
    assert {one.pid for one in ranks.values()} <= bench.left().keys()
    assert set(job.ranks()) == {0, 1}
    assert job.stop(grace_s=5.0) == []
    assert bench.left() == {}
    codes = {event.data["pid"]: event.data["exit_code"] for event in bench.events(Kind.RANK_EXITED)}
    assert codes == {one.pid: -9 for one in ranks.values()}


def test_orphans_are_cleared_away_before_a_resubmission(bench: Bench) -> None:
    """What a killed torchrun leaves does not run beside the next submission, and the journal says so."""
    job = bench.linger(resubmit_times=1)
    before = bench.ranks(job)
    os.kill(job.agents()[0].pid, signal.SIGKILL)
    bench.ranks(job, attempt=1)
    assert {one.pid for one in before.values()} <= {event.data["pid"] for event in bench.events(Kind.RANK_EXITED)}
    assert "outlived submission 0" in bench.event(Kind.NOTE).data["text"]


def test_a_grace_lets_the_ranks_end_by_themselves(bench: Bench) -> None:
    """`stop` first sends SIGTERM to torchrun, which passes it on, also to a rank that was stopped."""
    job = bench.linger()
    ranks = bench.ranks(job)
    os.kill(ranks[0].pid, signal.SIGSTOP)
    assert job.stop(grace_s=20.0) == []
    codes = {event.data["pid"]: event.data["exit_code"] for event in bench.events(Kind.RANK_EXITED)}
    assert codes == {one.pid: -15 for one in ranks.values()}
    assert job.stop() == []


def test_the_agents_of_a_job_that_has_none_are_an_error(bench: Bench) -> None:
    """Before there is a torchelastic agent with workers, and for a node that is not there, the message says so."""
    job = bench.job(sys.executable, "-c", "import time; time.sleep(600)")
    job.start()
    with pytest.raises(ChaosError, match="node 0 has no torchelastic agent now"):
        job.agents()
    with pytest.raises(ChaosError, match="node 3 has"):
        job.agents([3])


def test_a_command_that_can_not_be_started(bench: Bench) -> None:
    """It is an error of usage, and nothing is left running."""
    job = bench.job("no-such-program")
    with pytest.raises(UsageError, match="no-such-program"):
        job.start()
    assert job.stop() == []


def test_steps_are_read_from_the_output(bench: Bench) -> None:
    """Lines of steps come as events with the attempt that they belong to."""
    new_log = partial(JobLog, bench.journal, adapter_for(None))
    job = bench.job(sys.executable, "-c", "print('step 7 loss 2.5')", new_log=new_log)
    job.start()
    assert job.wait(300) == 0
    line = bench.event(Kind.LOG_STEP)
    assert (line.attempt, dict(line.data)) == (0, {"step": 7, "loss": 2.5, "lr": None, "adapter": "plain"})
