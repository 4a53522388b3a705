"""If any process dies while a node is stopped, the node's processes soon run again, and nothing is left on any node."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from waiting import wait_until

from torchaos.harness.host import processes
from torchaos.harness.protocol.wire import Kind

pytestmark = pytest.mark.slow

FROZEN = {"inject": "node.freeze", "target": {"node": 1}, "when": {"step": 8, "phase": "backward"}, "for": "90s"}


def _stopped(nodes: Any) -> Sequence[int]:
    """The processes of the node that was stopped, as soon as it is stopped."""
    told = nodes.seen(Kind.EFFECT)
    nodes.seen(Kind.APPLIED)
    return [int(pid) & (1 << 22) - 1 for pid in told.data["pids"]]


def _runs_again(pids: Sequence[int]) -> None:
    """Each of them is gone or runs."""
    wait_until(
        lambda: [found for pid in pids if (found := processes.stat(pid)) and found.state == "T"], lambda left: not left
    )


@pytest.fixture
def frozen(nodes: Any) -> tuple[Any, Any, Sequence[int]]:
    run = nodes.run(FROZEN, steps=4000)
    return nodes, run, _stopped(nodes)


def test_the_agent_dies(frozen: Any) -> None:
    """Its reaper resumes the processes and ends them; the controller says that it lost the node, and the verdict is
    inconclusive."""
    nodes, run, pids = frozen
    os.kill(nodes.agent(1), signal.SIGKILL)
    _runs_again(pids)
    said = run.communicate(timeout=300)[0]
    assert run.returncode == 2, said
    assert "node 1 was lost" in said
    assert nodes.processes() == {}


@pytest.mark.long
def test_the_reaper_dies(frozen: Any) -> None:
    """The agent resumes the processes by itself when the run ends."""
    nodes, run, pids = frozen
    os.kill(nodes.reaper(1), signal.SIGKILL)
    run.send_signal(signal.SIGINT)
    _runs_again(pids)
    run.communicate(timeout=300)
    assert nodes.processes() == {}


def test_both_die(frozen: Any) -> None:
    """The controller reaches the node again, and lets another process undo what is in its undo log."""
    nodes, run, pids = frozen
    agent, reaper = nodes.agent(1), nodes.reaper(1)
    os.kill(reaper, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    _runs_again(pids)
    said = run.communicate(timeout=300)[0]
    assert run.returncode == 2, said
    assert "what it held is undone" in said
    assert nodes.processes() == {}


def _kill_controller(nodes: Any, run: Any) -> None:
    """The controller and its reaper at the same time: nobody is left who could tell the nodes."""
    os.kill(nodes.pid("rollback.reaper", str(nodes.record.root)), signal.SIGKILL)
    run.kill()


def _stop_controller(nodes: Any, run: Any) -> None:
    run.send_signal(signal.SIGSTOP)


@pytest.mark.long
@pytest.mark.parametrize("end", [_kill_controller, _stop_controller])
def test_nobody_speaks_any_more(frozen: Any, end: Callable[[Any, Any], None]) -> None:
    """At the end of the lease the agent takes everything back by itself, and the job goes on and is recorded."""
    nodes, run, pids = frozen
    end(nodes, run)
    _runs_again(pids)
    note = nodes.seen(Kind.NOTE, lambda event: "node 1: the controller said nothing for 10 s" in event.data["text"])
    nodes.seen(Kind.STEP, lambda event: event.rank == 1 and event.mono_s > note.mono_s)
    run.send_signal(signal.SIGCONT)


def _pipes(nodes: Any) -> set[int]:
    return {pid for pid, line in nodes.processes().items() if "node --join" in line and ".node1" in line}


@pytest.mark.long
def test_the_pipe_breaks(frozen: Any) -> None:
    """The controller makes another pipe to the same agent, within the lease; each event comes once, and the fault is
    taken back at the end."""
    nodes, run, pids = frozen
    heard = len(nodes.events(Kind.CLOCK))
    pipes = _pipes(nodes)
    for pid in pipes:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: _pipes(nodes) - pipes)
    wait_until(lambda: len(nodes.events(Kind.CLOCK)), lambda now: now > heard)
    assert not nodes.events(Kind.ROLLED_BACK)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=300)
    _runs_again(pids)
    assert nodes.events(Kind.ROLLED_BACK)[0].data["verified"]
    assert nodes.processes() == {}


def test_the_scheduler_ends_the_node(frozen: Any) -> None:
    """SIGTERM to the wrapper: everything is taken back at once, so that the command can end in order."""
    nodes, run, pids = frozen
    os.kill(nodes.agent(1), signal.SIGTERM)
    _runs_again(pids)
    assert nodes.seen(Kind.NOTE, lambda event: "the scheduler ends the job" in event.data["text"]).source == "node1"
    run.communicate(timeout=300)
    assert nodes.processes() == {}
