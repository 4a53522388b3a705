"""What the agents of other nodes are told about faults, with connections that only note it."""

from __future__ import annotations

import threading
from typing import Any

from torchaos.harness.interfaces import Target
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.record.plan import After, PlannedFault
from torchaos.harness.running.launchers.fault_appliers import RemoteFaults


class Noted:
    """A connection to the agent of a node."""

    def __init__(self, node: int) -> None:
        self.node, self.left, self.begun = node, threading.Event(), list[str]()

    def tell(self, do: str, **words: Any) -> None:
        if do == "start" and not self.left.is_set():
            self.begun.append(words["fault"])


def planned(name: str, trigger: Moment | After) -> PlannedFault:
    return PlannedFault(name, "node.kill", "node", Target((), nodes=(0,)), trigger, {}, "", "")


SEEN, STEP = planned("seen-from-outside", After(1.0)), planned("at-a-step", Moment(0, 50, None))


def faults_of(channels: list[Any]) -> RemoteFaults:
    return RemoteFaults({fault.id: fault for fault in (SEEN, STEP)}, lambda: channels, dict)


def test_the_next_submission_gets_no_second_order() -> None:
    """A fault that its agents were told to apply at once is not applied again by the agents of the next submission;
    a fault that waits for a step is, because that step may not have come."""
    channels: list[Any] = [Noted(0)]
    faults = faults_of(channels)
    for fault in (SEEN, STEP):
        faults.begin(fault)
    again: Any = Noted(0)  # the same agent, over a new pipe
    faults.send_state(again)
    assert channels[0].begun == again.begun == [SEEN.id, STEP.id]
    faults.submitted_again()
    channels[:] = [Noted(0)]
    faults.send_state(channels[0])
    assert channels[0].begun == [STEP.id]


def test_an_order_between_two_submissions() -> None:
    """A fault that is due while no agent is connected is applied by the agents of the next submission."""
    channels: list[Any] = [Noted(0)]
    faults = faults_of(channels)
    channels[0].left.set()
    faults.begin(SEEN)
    faults.submitted_again()
    channels[:] = [Noted(0)]
    faults.send_state(channels[0])
    assert channels[0].begun == [SEEN.id]
