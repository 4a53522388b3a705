"""The life of a node's agent: from its folder on the node to the removal of that folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running import capabilities
from torchaos.harness.running.launchers.fits import needs_of_controller
from torchaos.harness.running.nodes import leftovers
from torchaos.harness.running.nodes.agent import Agent
from torchaos.harness.running.nodes.faults import NodeFaults
from torchaos.harness.running.nodes.part import NodePart
from torchaos.harness.running.nodes.place import make_place, remove_place, socket_of
from torchaos.harness.running.nodes.relay import Relay
from torchaos.harness.undo.client import UndoError

# What a capability is in a pod, which makes no namespaces: its own network may be changed.
_IN_A_POD = {"links": "own_network", "shaper": "tc"}
_MEET_S = 60.0  # seconds to wait for the controller; without it, an early fault would come too late


@contextmanager
def serving(
    folder: RunDir, mark: str, node: int, part: NodePart, journal: Journal, relay: Relay
) -> Iterator[tuple[Agent, NodeFaults | None]]:
    """A context manager in which this process is the agent of its node. It begins when a controller has connected. The
    faults are None if nothing can be injected here. At the end everything is undone, and the node's folder is removed
    if that is verified."""
    place = make_place(mark)
    plan, faults, trouble = Plan.read(folder.plan), None, leftovers.undo_for_the_dead(journal)
    try:
        faults = NodeFaults(plan, folder, place, mark, node, part, journal)
    except UndoError as error:  # the job runs, and the controller ends the run
        trouble = str(error)
    needs = set(plan.needs) - needs_of_controller(plan.launcher, (fault.inject for fault in plan.faults))
    if part.links:
        needs = {_IN_A_POD.get(name, name) for name in needs}
    findings = [capabilities.check(name) for name in sorted(needs)]
    missing = [f"{found.name} ({found.remedy})" for found in findings if not found.present]
    agent = Agent(
        socket_of(mark), node, journal, faults, relay.send, folder=folder.root, missing=missing, trouble=trouble
    )  # fmt: skip
    relay.on_signal = agent.take_back
    agent.await_controller(_MEET_S)
    try:
        yield agent, faults
    finally:
        clean = agent.settle()
        part.stop()
        agent.close()
        if clean:
            remove_place(mark)
