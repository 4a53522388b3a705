"""The life of a job whose nodes are other machines, with a launcher that starts its commands on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from torchaos.harness.interfaces import Handle, JobSpec, Node, RemoteLauncher
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.running.launchers import remote_job
from torchaos.harness.running.launchers.job import job_env
from torchaos.harness.running.launchers.local import LocalNode
from torchaos.harness.running.launchers.remote_job import RemoteJob

Bench = Any  # of conftest.py, which tests can't import


class Quiet(LocalNode):
    """A node whose agent says goodbye at once."""

    def argv(self, command: Sequence[str]) -> list[str]:
        return ["echo", '{"bye": 0}']


class Lost(LocalNode):
    """A node whose agent is dead. It takes a moment to undo what it left."""

    def argv(self, command: Sequence[str]) -> list[str]:
        return ["sleep", "0.3"] if "--recover" in command else ["echo", '{"error": "it died"}']


class Slow(LocalNode):
    """A node that is gone while the last words of its agent are still on the way."""

    def argv(self, command: Sequence[str]) -> list[str]:
        return ["sh", "-c", """echo '{"beat": 0, "mono_s": 0}'; sleep 0.5; echo '{"bye": 0}'"""]


class GoesOn(LocalNode):
    """A node whose part of the job goes on for 1.5 s after the death of the command that started it."""

    def argv(self, command: Sequence[str]) -> list[str]:
        beats = """for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do echo '{"beat": 0, "mono_s": 0}'; sleep 0.1; done"""
        return ["sh", "-c", f"""{beats}; echo '{{"bye": 0}}'"""]


class Far(RemoteLauncher):
    """The first submission fails, and the second does not end by itself. `between()` is called while the second is
    made."""

    name: ClassVar[str] = "far"

    def __init__(self, between: Callable[[], object], nodes: Sequence[Node] = (Quiet(0),)) -> None:
        self._between, self._nodes = between, nodes

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        return ()

    def create(self, spec: JobSpec) -> Sequence[Node]:
        if spec.submission:
            self._between()
        return self._nodes

    def gone(self, node: Node) -> bool:
        return True

    def commands(self, spec: JobSpec, nodes: Sequence[Node], wrapper: Sequence[str]) -> Sequence[Sequence[str]]:
        return [["sleep", "600"] if spec.submission else ["false"]]


@pytest.fixture
def far(bench: Bench) -> Callable[..., RemoteJob]:
    def make(*given: Any) -> RemoteJob:
        def spec_for(submission: int) -> JobSpec:
            env = job_env(os.environ, run_id=bench.run_id, agent_plan=None)
            return JobSpec((), bench.folder, env, bench.folder / f"job-{submission}.log", submission)

        job = RemoteJob(spec_for, Far(*given), bench.journal, Path(bench.folder), resubmit_times=3)
        bench.jobs.append(job)
        return job

    return make


def test_a_stop_while_it_is_submitted_again(
    bench: Bench, far: Callable[..., RemoteJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `stop` that comes in the middle of a submission waits until the submission is made, and ends it."""
    submitting, looked = threading.Event(), threading.Event()

    def between() -> None:
        submitting.set()
        looked.wait(0.5)  # a `stop` that does not wait looks for processes now, and finds none

    job = far(between)
    members = job.members

    def look() -> dict[int, int]:
        if submitting.is_set():
            looked.set()
        return members()

    monkeypatch.setattr(job, "members", look)
    job.start()
    assert submitting.wait(60.0)
    stopping = threading.Thread(target=job.stop, daemon=True)
    stopping.start()
    stopping.join(30.0)
    assert not stopping.is_alive()
    assert bench.left() == {}
    assert len(bench.events(Kind.JOB_STARTED)) == 2


def test_no_submission_after_a_stop(
    bench: Bench, far: Callable[..., RemoteJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the job is stopped when a submission is over, and just before the next, there is no next."""
    job = far(lambda: None)

    def stopped_after_the_delay(timeout_s: float) -> bool:
        job._ending.set()
        return False

    monkeypatch.setattr(job._ending, "wait", stopped_after_the_delay)
    job.start()
    bench.wait_until(lambda: job.done)
    assert len(bench.events(Kind.JOB_STARTED)) == 1


def test_lost_nodes_are_cleaned_up_before_the_next_submission(bench: Bench, far: Callable[..., RemoteJob]) -> None:
    """The agents of a submission are dead, as after a scancel by SIGKILL. What they left is undone on every node before
    the next submission has agents there, and the nodes get the number of its first attempt from the controller."""
    undone: list[int] = []

    def between() -> None:
        undone.append(
            len([one for one in bench.events(Kind.NOTE) if "after the loss of its agent" in one.data["text"]])
        )

    job = far(between, [Lost(0), Lost(1)])
    job.start()
    bench.wait_until(lambda: len(bench.events(Kind.JOB_STARTED)) == 2)
    assert undone == [2]
    assert [(bench.folder / "clock" / f"base-{number}").read_text() for number in (0, 1)] == ["0", "0"]
    job.stop()


def ends_when_connected(bench: Bench, job: RemoteJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the command that started the job count as ended only when the agent has said something."""
    awaited = job._await_last_messages

    def once_connected() -> None:
        bench.wait_until(lambda: job._channels[0].connected or job._channels[0].left.is_set())
        awaited()

    monkeypatch.setattr(job, "_await_last_messages", once_connected)


def test_the_last_words_of_a_node_that_is_gone(
    bench: Bench, far: Callable[..., RemoteJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent whose pipe still brings something is not lost, although its node is gone already."""
    job = far(lambda: None, [Slow(0)])
    monkeypatch.setattr(remote_job, "_GONE_S", 0.0)
    ends_when_connected(bench, job, monkeypatch)
    job.start()
    bench.wait_until(lambda: len(bench.events(Kind.JOB_STARTED)) == 2)
    assert not job.trouble
    job.stop()


def test_the_job_goes_on_without_the_command_that_started_it(
    bench: Bench, far: Callable[..., RemoteJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that answers is alive, however long its part of the job goes on after the death of its srun: it is not
    taken for a lost agent."""
    monkeypatch.setattr(remote_job, "_BYE_S", 0.3)
    job = far(lambda: None, [GoesOn(0)])
    ends_when_connected(bench, job, monkeypatch)
    job.start()
    bench.wait_until(lambda: len(bench.events(Kind.JOB_STARTED)) == 2)
    assert job.trouble == ""
    assert not [one for one in bench.events(Kind.NOTE) if "after the loss of its agent" in one.data["text"]]
    job.stop()


@pytest.mark.parametrize(
    ("ups", "exits", "commands", "code"),
    [
        ([(0, 0), (1, 0)], {0: 0, 1: 3}, [0, 0], 3),
        ([(0, 0), (1, 0)], {0: 0, 1: 0}, [1], 0),  # srun itself failed, and each node ended well
        ([(0, 0), (1, 0)], {0: 0}, [9], 9),  # an agent was lost: the launcher's command is all that is known
        ([(0, 0), (1, 0), (0, 1)], {0: 0, 1: 3}, [0], 0),  # node 1 left, and the job went on without it
        ([], {0: 0, 1: 3}, [0], 3),  # no rank was up
    ],
)
def test_the_exit_code_is_that_of_the_nodes_at_the_end(
    bench: Bench,
    far: Callable[..., RemoteJob],
    ups: Sequence[tuple[int, int]],
    exits: dict[int, int],
    commands: Sequence[int],
    code: int,
) -> None:
    """The first failure among the nodes that had ranks in the last attempt, as their agents tell it. `ups`: the nodes
    with ranks, and in which attempt."""
    job = far(lambda: None, [Quiet(0), Quiet(1)])
    job._nodes = [Quiet(0), Quiet(1)]
    for node, attempt in ups:
        data = {"pid": 7, "start_ticks": 1, "local_rank": 0, "world_size": 2, "node": node}
        bench.journal.emit(Kind.RANK_UP, data, rank=node, attempt=attempt)
    for node, exit_code in exits.items():
        data = {"submission": 0, "node": node, "pid": 7, "exit_code": exit_code}
        bench.journal.emit(Kind.NODE_EXITED, data)
        bench.journal.emit(Kind.NODE_EXITED, {**data, "submission": 1, "exit_code": 5})
    assert job._code(commands) == code
