"""The agent of a node whose part of the job was running before torchaos. It ends with the run, and the job goes on."""

from __future__ import annotations

import os
import select
import sys
import time
from typing import IO

from torchaos.harness.agent.wire import ENV_NODE, ENV_REPLICA, Kind
from torchaos.harness.contracts import UsageError
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.launchers.handover import await_place, receive
from torchaos.harness.running.nodes.agent import Agent
from torchaos.harness.running.nodes.part import NodePart
from torchaos.harness.running.nodes.place import make_place, remove_place
from torchaos.harness.running.nodes.relay import Relay
from torchaos.harness.running.nodes.serving import serving
from torchaos.harness.watching.probes.agents import check_agent, torchrun_here
from torchaos.harness.watching.probes.census import environ_of
from torchaos.harness.watching.probes.ranks import RankWatch, exit_code

READY = "attached"  # the only line on standard output
_LOOK_MS = 50


def attach(mark: str, given: IO[bytes]) -> None:
    """Is the agent of this node, under the name `mark`, until the job or the run ends. `given`: the data of
    `handover.packed`. Everything that is written is below the node's folder, which is removed at the end. Raises
    UsageError if there is not exactly one torchrun, or if it can't be observed from here."""
    pid = torchrun_here()
    ticks, place = check_agent(pid), make_place(mark)
    os.environ["XDG_STATE_HOME"] = str(place.root / "state")  # so that nothing is left in the home folder
    try:
        folder = RunDir(place.root / "run")
        receive(folder.root, given)
        node, _hosts = await_place(folder.root, 0, 0.0)
        _serve(folder, mark, node, pid, ticks)
    except UsageError:
        remove_place(mark)
        raise


def _serve(folder: RunDir, mark: str, node: int, pid: int, ticks: int) -> None:
    pidfd = os.pidfd_open(pid)
    journal = Journal(folder.events, f"node{node}", node=node)
    watch = RankWatch(journal, None, node)
    watch.add_root(pid)
    environ = environ_of(pid)
    part = NodePart(watch, node, mark, {name: environ[name] for name in (ENV_NODE, ENV_REPLICA) if name in environ})
    watch.start()
    print(READY, flush=True)
    sys.stdout.close()
    try:
        with Relay() as relay, serving(folder, mark, node, part, journal, relay) as (agent, _):
            journal.emit(Kind.NODE_STARTED, {"submission": 0, "node": node, "pid": pid})
            if _await_end(pidfd, agent):
                data = {"submission": 0, "node": node, "pid": pid, "exit_code": exit_code(pid, ticks, pidfd)}
                journal.emit(Kind.NODE_EXITED, data, mono_s=time.monotonic())
    finally:
        watch.stop()
        journal.close()
        os.close(pidfd)


def _await_end(pidfd: int, agent: Agent) -> bool:
    """Waits until torchrun ends, or until the agent has undone everything. Returns whether torchrun has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    while not agent.lapsed:
        if poll.poll(_LOOK_MS):
            return True
    return False
