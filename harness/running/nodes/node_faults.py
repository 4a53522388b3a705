"""The part of a job that is on this node, as a fault sees it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from torchaos.harness.agent.agent_plan import AgentPlan
from torchaos.harness.agent.control_pages import ControlPage
from torchaos.harness.agent.wire import ENV_NODE, Kind
from torchaos.harness.fault_drivers.network.links import Link
from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError, Target
from torchaos.harness.monitoring.probes.rank_probe import RankWatch
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.rollback.healer import Healed
from torchaos.harness.rollback.reaper_client import Reaper, UndoError
from torchaos.harness.running.engine.blast_radius import Permits
from torchaos.harness.running.engine.fault_life import Context, FaultLife, Slots
from torchaos.harness.running.launchers.command import LiveNode
from torchaos.harness.running.launchers.job import JobView
from torchaos.harness.running.launchers.local import LocalNode


class NodePart(JobView):
    """This node's part of a job. `mark`: the mark that all its processes carry. `env`: the part of their environment
    that says where they are; by default the number of the node. `links`: the link of each node, if faults can change
    that of this node."""

    def __init__(
        self, watch: RankWatch, node: int, mark: str, env: Mapping[str, str] | None = None, links: Sequence[Link] = ()
    ) -> None:  # fmt: skip
        super().__init__(watch)
        self._node, self._mark, self.links = node, mark, links
        self._beside: Collection[int] = ()
        self._env = {ENV_NODE: str(node)} if env is None else env

    def stop(self) -> None:
        """Stops watching."""
        self._watch.stop()

    def beside(self, nodes: Collection[int]) -> NodePart:
        """The same part, for a fault that other agents apply on the nodes `nodes`: it does not cut this node off from
        them."""
        other = copy.copy(self)
        other._beside = [node for node in nodes if node != self._node]
        return other

    def nodes(self) -> list[LiveNode]:
        """This node; and the other nodes, if faults can change its link to them."""
        if not self.links:
            return [self._live(LocalNode(self._node, self._env))]
        nodes = [LocalNode(index, self._env, link) for index, link in enumerate(self.links)]
        return [self._live(node) for node in nodes if node.index not in self._beside]

    def _live(self, node: LocalNode) -> LiveNode:
        return LiveNode(node, self._mark, self._whole, self._no_return, self._no_return)

    def _whole(self) -> dict[int, int]:
        """All processes of the node. Raises ChaosError if a fault can't reach one of them."""
        found = self.members()
        if 1 in found:
            raise ChaosError(
                "torchrun is the first process of its container, which the kernel shields from signals of that "
                "container; aim at ranks, or attach from a sidecar of a pod with shareProcessNamespace"
            )
        return found

    def members(self) -> dict[int, int]:
        living = {pid: ticks for pid, ticks in self._watch.members().items() if processes.is_alive(pid, ticks)}
        return {**living, **processes.family(self._mark)}

    def _no_return(self, index: int) -> NoReturn:
        raise ChaosError(f"node {index} is a machine of its own, and its command can't be started again from here")


# The faults of a plan that hit this node. They are applied by the same code as in a run on one machine, with an undo
# log, a reaper and control pages on this node.

SPARE_S = 60.0  # seconds after the job's time-out, at which the node's reaper ends its part of the job
JOIN_S = 10.0


class NodeFaults:
    """The faults on this node. `shared`: the run directory; `place`: this node's own folder. Raises UndoError if the
    reaper can't be started; then nothing may be injected here. Thread-safe."""

    def __init__(
        self, plan: Plan, shared: RunDir, place: RunDir, mark: str, node: int, part: NodePart, journal: Journal
    ) -> None:  # fmt: skip
        self._plan, self._node, self._part, self._journal, self._place = plan, node, part, journal, place
        self._slots = {fault.id: Slots.make(fault, place) for fault in plan.faults}
        self._lives: dict[str, FaultLife] = {}
        self._lock = threading.Lock()
        job = plan.job
        parts = (word.replace("{run}", str(shared.job)) for word in (job.cwd, job.checkpoints or ""))
        self._checkpoints = Path(*parts) if job.checkpoints else None
        self._reaper = Reaper.start(place.root, mark)
        limit_s = job.timeout_s + SPARE_S
        try:
            self._reaper.guard("job", [JobProcesses(mark)], owner="job", limit_s=limit_s)
        except UndoError:
            self._reaper.close()  # a reaper that died leaves its entry in the registry of runs
            raise
        folders = [place.root, shared.root, *([self._checkpoints] if self._checkpoints else [])]
        permits = Permits(plan, mark, folders, part.members, lambda: _world_size(part), has_network=bool(part.links))
        self._context = Context(
            journal, part, self._reaper, limit_s, place.undo, self._checkpoints, permits, due=lambda trigger: True
        )
        self._context.steady.set()  # the controller checks the steady state

    def write_plan(self, shared: AgentPlan) -> Path:
        """Writes the agent's plan for the ranks of this node, and returns its path. It is the plan `shared` of all
        nodes, with orders for the control pages of this node."""
        orders = tuple(order for slot in self._slots.values() for order in slot.orders())
        replace(shared, orders=orders).write(self._place.agent_plan)
        return self._place.agent_plan

    def start(self, fault: str, ranks: Sequence[int]) -> None:
        """Starts the fault on this node, unless it has started already. `ranks`: the ranks of its target that it may
        hit here."""
        planned = next(each for each in self._plan.faults if each.id == fault)
        with self._lock:
            if fault in self._lives or self._context.ended.is_set():
                return
            target = Target(tuple(ranks), tuple(node for node in planned.target.nodes if node == self._node))
            context = replace(self._context, job=self._part.beside(planned.target.nodes))
            life = self._lives[fault] = FaultLife(replace(planned, target=target), self._slots[fault], context)
            life.start()

    def write(self, fault: str, rank: int, word: int, value: int) -> None:
        """Writes a word of a control page. `FIRED` only grows: if a rank of another node has fired, none fires here."""
        page = self._slots[fault].pages.get(rank)
        if page is not None and (word != ControlPage.FIRED or page.read(word) < value):
            page.write(word, value)

    def end(self) -> list[str]:
        """Lets no further fault begin, and held ranks go on. Returns the faults that are still being applied."""
        self._context.ended.set()
        with self._lock:
            lives = list(self._lives.items())
        return [name for name, life in lives if not life.join(JOIN_S)]

    def heal(self, fault: str | None = None) -> None:
        """Undoes a fault, or all faults if it is None, the last first. The result is in the journal."""
        with self._lock:
            lives = [life for name, life in reversed(self._lives.items()) if fault in (None, name)]
        for life in lives:
            life.roll_back()

    def close(self) -> bool:
        """Undoes everything, and ends the remaining processes of this node's part of the job. Returns whether all of
        this is verified."""
        self.end()
        self.heal()
        try:
            healed = self._reaper.close()
        except UndoError as error:
            healed = [Healed("all", {}, False, str(error))]
        for result in healed:
            self._journal.emit(Kind.HEALED, asdict(result))
        return all(result.verified for result in healed)


def _world_size(part: NodePart) -> int | None:
    return next((rank.world_size for rank in part.ranks().values()), None)
