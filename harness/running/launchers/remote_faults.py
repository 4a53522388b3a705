"""The faults of a job whose nodes are other machines, as the controller knows them: which nodes were asked to apply
them, and the words of their control pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchaos.harness.agent.control_pages import ControlPage
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.interfaces import ChaosError, RankProcess
from torchaos.harness.record.plan import After, PlannedFault
from torchaos.harness.running.launchers.node_channel import Line, NoAnswer


@dataclass
class FarFaults:
    """The faults that agents on other nodes apply. `planned`: the faults by id. `lines` and `ranks`: functions that
    return the current connections and ranks. Thread-safe."""

    planned: Mapping[str, PlannedFault]
    lines: Callable[[], Sequence[Line]]
    ranks: Callable[[], Mapping[int, RankProcess]]
    mending: threading.RLock = field(default_factory=threading.RLock)  # held while a lost node is cleaned up
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _begun: dict[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)  # by fault: the ranks to hit, by node
    _ordered: set[str] = field(default_factory=set)  # faults that a living agent was told to apply at once
    _words: dict[tuple[str, int, int], int] = field(default_factory=dict)  # by fault, rank and number of the word

    def begin(self, fault: PlannedFault) -> None:
        """Lets a fault begin on the nodes of its target. Raises ChaosError if the target has no process now."""
        shared = self._share(fault)
        lines = [line for line in self.lines() if line.node in shared]
        with self._lock:
            self._begun[fault.id] = shared
            if isinstance(fault.trigger, After) and not all(line.left.is_set() for line in lines):
                self._ordered.add(fault.id)
        for line in lines:
            line.tell("start", fault=fault.id, ranks=list(shared[line.node]))

    def submitted_again(self) -> None:
        """The next agents are those of another submission. They do not get the orders that agents have had already."""
        with self._lock:
            for fault in self._ordered:
                self._begun.pop(fault, None)

    def begun_on(self, node: int) -> list[str]:
        with self._lock:
            return [fault for fault, shared in self._begun.items() if node in shared]

    def tell_all(self, line: Line) -> None:
        """Sends an agent all words of control pages, and all faults that have begun. The agent may have connected for
        the first time or again."""
        with self._lock:
            words, begun = list(self._words.items()), dict(self._begun)
        for (fault, rank, word), value in words:
            line.tell("page", fault=fault, rank=rank, word=word, value=value)
        for fault, shared in begun.items():
            if line.node in shared:
                line.tell("start", fault=fault, ranks=list(shared[line.node]))

    def write(self, fault: str, rank: int, word: int, value: int) -> None:
        """Writes a word of the control page of a fault and rank, on every node."""
        with self._lock:
            self._words.pop((fault, rank, word), None)
            self._words[fault, rank, word] = value  # in the order of writing
        for line in self.lines():
            line.tell("page", fault=fault, rank=rank, word=word, value=value)

    def end(self) -> list[str]:
        """From now on no fault begins. Returns the faults that are still being applied."""
        stuck: set[str] = set()
        for line in self.lines():
            try:
                if not line.left.is_set():
                    stuck.update(line.ask("end"))
            except NoAnswer:
                continue
        return sorted(stuck)

    def heal(self, fault: str) -> list[str]:
        """Undoes a fault on all nodes that have it. Returns a reason for each node whose undo is not verified."""
        wrong = []
        with self.mending:
            for line in [line for line in self.lines() if not line.left.is_set()]:
                try:
                    line.ask("heal", fault=fault)
                except NoAnswer as error:
                    if not line.left.is_set():
                        wrong.append(str(error))
        return wrong

    def note(self, event: Event) -> None:
        """Notes that a fault has fired on a node, and writes that to the pages of the other nodes, so that it does not
        fire there too."""
        if event.kind not in (Kind.APPLYING, Kind.APPLIED):
            return
        fault = self.planned.get(event.data["fault"])
        if fault is None:
            return
        if fault.where == "rank" and event.kind is Kind.APPLYING and event.rank is not None:
            rank = event.rank
        elif fault.where == "node" and event.kind is Kind.APPLIED and not isinstance(fault.trigger, After):
            rank = fault.trigger.pacer
        else:
            return
        fired = self._words.get((fault.id, rank, ControlPage.FIRED), 0)
        self.write(fault.id, rank, ControlPage.FIRED, fired + 1)

    def _share(self, fault: PlannedFault) -> Mapping[int, Sequence[int]]:
        """The nodes on which a fault acts, each with the ranks of the target that the fault may hit there."""
        everywhere = {line.node: fault.target.ranks for line in self.lines()}
        if fault.where == "rank":
            return everywhere
        if fault.target.nodes:
            return dict.fromkeys(fault.target.nodes, fault.target.ranks)
        if not isinstance(fault.trigger, After):
            return everywhere  # the pacer is on one of them
        if not fault.target.ranks:
            return {0: ()}
        ranks, shared = self.ranks(), dict[int, list[int]]()
        for rank in fault.target.ranks:
            if rank not in ranks:
                raise ChaosError(f"rank {rank} has no process now")
            shared.setdefault(ranks[rank].node, []).append(rank)
        return shared
