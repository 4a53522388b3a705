"""The network of this pod, as faults see it: its own link, and the addresses of the other pods."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from torchaos.harness.agent.wire import ENV_NODE, ENV_REPLICA, Kind
from torchaos.harness.fault_drivers.network.links import Link
from torchaos.harness.host.netspace import Space
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.monitoring.probes.census import check_agent, environ_of, torchrun_here
from torchaos.harness.monitoring.probes.rank_probe import RankWatch, exit_code
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.launchers.node_run_dir import await_place, receive
from torchaos.harness.running.nodes.agent_life import Relay, serving
from torchaos.harness.running.nodes.node_agent import Agent
from torchaos.harness.running.nodes.node_faults import NodePart
from torchaos.harness.running.nodes.node_folder import make_place, remove_place

_HERE, _ELSEWHERE = Space(0, 0), Space(-1, 0)  # the network of a process that does not exist is never touched


def links_of_pods(addresses: Sequence[str], node: int, mark: str) -> list[Link]:
    """The link of each pod, of which faults can change only that of this pod, the pod `node`. `addresses`: the IP
    addresses of all pods. `mark`: the helper processes of faults get it. Raises ChaosError if this pod has no
    network."""
    device = _device()
    spaces = [_HERE if index == node else _ELSEWHERE for index in range(len(addresses))]
    return [
        Link(space, space, device, device, address, f"n{index}", "/etc/hosts", mark)
        for index, (space, address) in enumerate(zip(spaces, addresses, strict=True))
    ]


def _device() -> str:
    """The device of the default route (route(5)); without such a route, the first device but the loopback."""
    routes = [line.split() for line in Path("/proc/self/net/route").read_text().splitlines()[1:]]
    default = [fields[0] for fields in routes if fields[1] == fields[7] == "00000000"]
    others = [name for _number, name in socket.if_nameindex() if name != "lo"]
    if not default and not others:
        raise ChaosError("this pod has no network device that a fault could change")
    return (default or others)[0]


# The agent of a node whose part of the job was running before torchaos. It ends with the run, and the job goes on.

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
