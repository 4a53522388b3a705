"""The faults of a plan that hit this node. They are applied by the same code as in a run on one machine, with an undo
log, a reaper and control pages on this node."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torchaos.harness.agent.page import ControlPage
from torchaos.harness.agent.plan import AgentPlan
from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import Target
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.engine.arming import Slots
from torchaos.harness.running.engine.faults import Context, FaultLife
from torchaos.harness.running.engine.permits import Permits
from torchaos.harness.running.nodes.part import NodePart
from torchaos.harness.undo.client import Reaper, UndoError
from torchaos.harness.undo.handles import JobProcesses
from torchaos.harness.undo.healer import Healed

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
