"""The base classes and the parts of faults of whole nodes. Some hit, from here, all of the job's processes on a node:
torchrun, the ranks, and their child processes. The others are carried out by the scheduler of the nodes: Slurm's
programs or kubectl give the orders, with the rights of the user."""

from __future__ import annotations

import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchaos.harness.base_classes import Fault
from torchaos.harness.fault_drivers import cpu_throttle
from torchaos.harness.fault_drivers.network.links import Helper
from torchaos.harness.host import processes
from torchaos.harness.interfaces import (
    ChaosError,
    Emit,
    Evidence,
    Handle,
    Hits,
    Irreversible,
    LiveNode,
    NodeSite,
    Probe,
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
    """Evidence that a process that the fault ended has exited, with whatever exit code: a process that ends normally
    chooses its own."""
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


class SchedulerFault(Fault, ABC):
    """A fault of the job's nodes that their scheduler carries out, by default Slurm. It is felt if the scheduler
    reports its effect for each target node. `who`: the scheduler in words. `whole_job`: the fault hits all nodes of the
    job. `batch`: the fault is possible only for a batch job of Slurm."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"slurm"})
    hits: ClassVar[Hits] = "nodes"
    who: ClassVar[str] = "Slurm"
    whole_job: ClassVar[bool] = False
    batch: ClassVar[bool] = False

    @abstractmethod
    def order(self, live: LiveNode) -> None:
        """Gives the order to the scheduler. Called for each target node, or once if the fault hits the whole job.
        Raises OSError if the scheduler refuses."""

    def said(self, node: Any) -> str:
        """The scheduler's words about a node, if the fault has taken effect there. Otherwise empty. Raises OSError if
        the scheduler does not answer."""
        return f"node {node.index} is not the job's any more" if node.over() else ""

    def changes(self, site: NodeSite) -> Sequence[Handle] | Irreversible:
        return Irreversible("the job was ended; only Slurm can start it again")

    def apply(self, site: NodeSite) -> None:
        try:
            for live in site.nodes[: 1 if self.whole_job else None]:
                self.order(live)
        except OSError as error:
            raise ChaosError(str(error)) from error

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return (_Answers(site.fault, site.nodes, self.who, self.said),)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        seen = [event for event in record.of_fault(fault, Kind.EFFECT) if "node" in event.data]
        wanted = {event.data.get("node") for event in record.of_fault(fault, Kind.APPLYING)}
        if not wanted or not wanted <= {event.data["node"] for event in seen}:
            return None
        return Evidence.of("; ".join(event.data["effect"] for event in seen), *seen)


@dataclass
class _Answers:
    """A probe that reports, once for each node, the scheduler's words about the effect of the fault. `said`: returns
    these words, or an empty text."""

    fault: str
    nodes: Sequence[LiveNode]
    who: str
    said: Callable[[Any], str]
    period_s: float = 0.5
    _seen: set[int] = field(default_factory=set)

    def sample(self, emit: Emit) -> None:
        for live in self.nodes:
            if live.node.index in self._seen:
                continue
            with suppress(OSError):  # the scheduler may not answer for a while
                if found := self.said(live.node):
                    self._seen.add(live.node.index)
                    effect = f"{self.who} says: {found}"
                    emit(Kind.EFFECT, {"fault": self.fault, "effect": effect, "node": live.node.index})


class PodDeath(SchedulerFault):
    """A fault that ends the pods of nodes. It is felt if the API server says that the container of the job does not run
    any more. `rights`: the rights that the user needs, as (verb, resource)."""

    needs: ClassVar[frozenset[str]] = frozenset({"kubectl"})
    lethal: ClassVar[bool] = True
    who: ClassVar[str] = "the API server"
    rights: ClassVar[Sequence[tuple[str, str]]]

    @abstractmethod
    def end(self, pod: Any) -> None:
        """Asks the API server to end the pod. Raises OSError if it refuses."""

    def order(self, live: LiveNode) -> None:
        self.end(live.node)

    def said(self, node: Any) -> str:
        return f"the container of node {node.index} does not run any more" if node.gone() else ""

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("a pod that has ended does not come back; a controller of the cluster may make another")
