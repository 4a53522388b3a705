"""A run whose nodes are other machines: where faults land, who sees them, and how they are taken back."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from torchaos.harness.protocol.wire import Kind

STEP = {"step": 8, "phase": "backward"}


def test_a_rank_of_another_node_is_killed(nodes: Any) -> None:
    """The fault lands once, in the rank on the second node; that node's agent sees the death, and the rank comes back
    without a second fault. The times of both nodes are in one clock, and nothing is left on either."""
    run = nodes.run({"inject": "process.kill", "target": {"rank": 1}, "when": STEP})
    said = run.communicate(timeout=300)[0]
    assert run.returncode in (0, 2), said  # the stand-in's other node does not wait for the first
    (hit,) = nodes.events(Kind.APPLYING)
    deaths = [event for event in nodes.events(Kind.RANK_EXITED) if event.data["exit_code"] == -signal.SIGKILL]
    assert [(one.source, one.data["pid"]) for one in deaths] == [("node1", hit.data["pid"])]
    assert {event.source for event in nodes.events(Kind.CLOCK)} == {"node0", "node1"}
    assert nodes.processes() == {}
    assert not list((nodes.folder / "tmp").glob("torchaos-*/*"))


@pytest.mark.slow
def test_a_node_stops_for_its_time(nodes: Any) -> None:
    """The agent of the node stops all processes there while their rank is held, and resumes them when the time is over,
    by its own clock; the other node is not touched."""
    fault = {"inject": "node.freeze", "target": {"node": 1}, "when": STEP, "for": "700ms"}
    run = nodes.run(fault)
    said = run.communicate(timeout=300)[0]
    assert run.returncode == 0, said
    applied, back = nodes.events(Kind.APPLIED)[0], nodes.events(Kind.ROLLED_BACK)[0]
    assert applied.source == back.source == "node1"
    assert back.data["verified"]
    assert 0.65 < back.mono_s - applied.mono_s < 5.0
    assert {event.source for event in nodes.events(Kind.RANK_STATE)} == {"node1"}


@pytest.mark.slow
def test_a_fault_that_is_seen_from_outside(nodes: Any) -> None:
    """A fault without a step begins when the controller says so, on the node that has its rank at that time."""
    fault = {"inject": "process.kill", "target": {"rank": 1}, "when": {"time": "1s"}}
    run = nodes.run(fault, steps=1500, steady_state=["ranks_up"])
    said = run.communicate(timeout=300)[0]
    assert run.returncode in (0, 2), said
    (hit,) = nodes.events(Kind.APPLYING)
    assert (hit.source, hit.rank) == ("node1", 1)
