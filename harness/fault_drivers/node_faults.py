"""The base class and the parts of faults of whole nodes. They hit all of the job's processes on a node: torchrun, the
ranks, and their child processes."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Mapping
from typing import ClassVar

from torchaos.harness.base_classes import Fault
from torchaos.harness.fault_drivers import cpu_throttle
from torchaos.harness.fault_drivers.network.links import Helper
from torchaos.harness.host import processes
from torchaos.harness.interfaces import (
    ChaosError,
    Evidence,
    Handle,
    Hits,
    Irreversible,
    LiveNode,
    NodeSite,
    Where,
)
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.handles import Process
from torchaos.harness.rollback.network_handles import mark_of

KILL_S = 30.0  # seconds


class NodeDeath(Fault):
    """The base class of faults that kill all of the job's processes on nodes."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd", "proc"})
    lethal: ClassVar[bool] = True
    hits: ClassVar[Hits] = "nodes"
    irreversible: ClassVar[str] = "torchaos can't bring back a dead node; the scheduler has to"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible(self.irreversible)


def processes_of(nodes: Iterable[LiveNode]) -> dict[int, int]:
    """The job's processes on these nodes: start time by pid. Raises ChaosError if a node has no such process."""
    targets: dict[int, int] = {}
    for live in nodes:
        here = live.processes()
        if not here:
            raise ChaosError(f"no process of the job is on node {live.node.index} now")
        targets.update(here)
    return targets


def kill(site: NodeSite) -> None:
    """Sends SIGKILL to all of the job's processes on the nodes, again and again until none is left. Raises ChaosError
    if there were none, or if some can't be killed."""
    killed: dict[int, int] = processes_of(site.nodes)
    deadline = time.monotonic() + KILL_S
    left = found = killed
    while found and time.monotonic() < deadline:
        left = dict.fromkeys(processes.kill(found, deadline), 0)
        found = {pid: ticks for live in site.nodes for pid, ticks in live.processes().items()}
        killed.update(found)
    tell(site, killed, "killed")
    if left:
        raise ChaosError(f"processes of the node can't be killed: {sorted(left)}")


def heads(targets: Mapping[int, int]) -> dict[int, int]:
    """The processes in `targets` whose parent is not in `targets`: torchrun, or a wrapper around it."""
    stats = {pid: processes.stat(pid) for pid in targets}
    return {pid: targets[pid] for pid, stat in stats.items() if stat and stat.parent not in targets}


def tell(site: NodeSite, targets: Iterable[int], done: str) -> None:
    names = ", ".join(str(live.node.index) for live in site.nodes)
    pids = sorted(targets)
    many = "1 process" if len(pids) == 1 else f"{len(pids)} processes"
    effect = f"{many} of node {names} {'was' if len(pids) == 1 else 'were'} {done}"
    site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect, "pids": pids})


def resumed(site: NodeSite) -> list[Handle]:
    """The handles that continue (SIGCONT) all processes of the job that are on the nodes now."""
    return [Process(pid, ticks, "resume", processes.boot_id()) for pid, ticks in processes_of(site.nodes).items()]


def slow_helper(site: NodeSite) -> Helper:
    return Helper(f"{site.nodes[0].run_id}.{mark_of(site.fault)}")


def slow_down(site: NodeSite, share: float) -> None:
    """Lets all processes of the job on the nodes run only for this share of the time. Raises ChaosError if the helper
    process does not start."""
    targets = processes_of(site.nodes)
    argv = [sys.executable, "-S", "-E", cpu_throttle.__file__, str(share), *(f"{p}:{t}" for p, t in targets.items())]
    answer = slow_helper(site).start(None, argv)
    if answer != "ready":
        raise ChaosError(f"the nodes could not be slowed down: {answer or 'the helper ended'}")
    tell(site, targets, f"slowed down to {100 * share:g} % of the time")


_EXITS = (Kind.RANK_EXITED, Kind.NODE_EXITED, Kind.JOB_EXITED)


def ended(record: Record, fault: str) -> Evidence | None:
    """Evidence that a process that the fault killed has exited by SIGKILL. It is a rank or the command of a node."""
    exits = (event for event in record.of_kind(*_EXITS) if event.data.get("exit_code") == -signal.SIGKILL)
    return _first(record, fault, exits, "pid {} ended with exit code -9")


def left(record: Record, fault: str) -> Evidence | None:
    """Evidence that a process that the fault ended has exited. The exit code does not matter, because a process that
    ends normally chooses it."""
    return _first(record, fault, record.of_kind(*_EXITS), "pid {} left")


def stopped(record: Record, fault: str) -> Evidence | None:
    """Evidence that the process probe saw a rank of the node in state T (stopped)."""
    states = (event for event in record.of_kind(Kind.RANK_STATE) if event.data["state"] == "T")
    return _first(record, fault, states, "the kernel showed pid {} as stopped")


def _first(record: Record, fault: str, events: Iterable[Event], words: str) -> Evidence | None:
    """Evidence from the first of these events that is about a process that the fault hit."""
    pids = {pid for event in record.of_fault(fault, Kind.EFFECT) for pid in event.data.get("pids", ())}
    seen = next((event for event in events if event.data["pid"] in pids), None)
    return Evidence.of(words.format(seen.data["pid"]), seen) if seen else None
