"""Who applies the faults of a run: `FaultApplier`, and `RemoteFaults` for faults that the agents of other nodes apply.
`LocalFaults`, for faults that this process applies, is in `engine/fault_lifecycle.py`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchaos.harness.interfaces import ChaosError, RankProcess
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import After, PlannedFault
from torchaos.harness.running.fault_checks import Permits
from torchaos.harness.running.launchers.node_channel import NoAnswer, NodeChannel


class FaultApplier(ABC):
    """Applies faults, and undoes them. On its own machine, the harness itself does it
    (`engine/fault_lifecycle.py`); on another machine, the agent of that node does."""

    @abstractmethod
    def takes(self, fault: PlannedFault) -> bool:
        """Whether this one applies the fault."""

    @abstractmethod
    def pages(self, fault: PlannedFault) -> Mapping[int, ControlPage]:
        """The control pages of the fault, by rank, see `ranks_with_page`."""

    @abstractmethod
    def begin(self, fault: PlannedFault) -> None:
        """Begins the fault: it is applied at its Moment, or at once if its trigger is seen from outside. Does nothing
        after `end`, or if the fault has begun already. Raises ChaosError if the fault can't begin."""

    @abstractmethod
    def end(self, wait_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> list[str]:
        """Lets no further fault begin, and lets held ranks go on. Waits at most `wait_s` seconds for each fault that is
        still being applied, or until `hurried()` is true. Returns the faults that are not over."""

    @abstractmethod
    def undo(self, fault: str) -> list[str]:
        """Undoes the fault, if it has begun. The machine that applies the fault records the result. If it could not
        record the result, returns the reasons why the fault counts as not undone."""


def ranks_with_page(fault: PlannedFault) -> Sequence[int]:
    """The ranks that have a control page for the fault. A fault in the rank has a page for each target; a fault from
    outside has a page for its pacer, the rank that is held."""
    if fault.where == "rank":
        return fault.target.ranks
    return () if isinstance(fault.trigger, After) else (fault.trigger.pacer,)


class RemoteControlPage(ControlPage):
    """A control page on other machines. The words that the controller writes are sent to the nodes, where the ranks
    read them."""

    def __init__(self, faults: RemoteFaults, fault: str, rank: int) -> None:
        self._faults, self._fault, self._rank = faults, fault, rank

    def write(self, word: int, value: int) -> None:
        self._faults.write(self._fault, self._rank, word, value)


@dataclass
class RemoteFaults(FaultApplier):
    """The faults that the agents of other nodes apply. `planned`: the faults of the plan by id. `channels`, `ranks`:
    functions that return the present connections and ranks. `ours`: the faults that the controller applies itself,
    because they need a tool that the launcher uses, such as kubectl. Thread-safe."""

    planned: Mapping[str, PlannedFault]
    channels: Callable[[], Sequence[NodeChannel]]
    ranks: Callable[[], Mapping[int, RankProcess]]
    ours: frozenset[str] = frozenset()
    permits: Permits | None = None
    recovering: threading.RLock = field(
        default_factory=threading.RLock
    )  # held while the changes on a lost node are undone
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _begun: dict[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)  # by fault: the ranks to hit, by node
    _ordered: set[str] = field(default_factory=set)  # faults that a living agent was told to apply at once
    _words: dict[tuple[str, int, int], int] = field(default_factory=dict)  # by fault, rank and number of the word

    def takes(self, fault: PlannedFault) -> bool:
        return fault.id not in self.ours

    def pages(self, fault: PlannedFault) -> Mapping[int, ControlPage]:
        return {rank: RemoteControlPage(self, fault.id, rank) for rank in ranks_with_page(fault)}

    def begin(self, fault: PlannedFault) -> None:
        """Tells the nodes of the target to begin the fault. Raises ChaosError if the fault would exceed the limits, or
        if the target has no process now."""
        if self.permits:
            self.permits.check(fault.target.ranks, fault.target.nodes)
        ranks_by_node = self._ranks_by_node(fault)
        channels = [channel for channel in self.channels() if channel.node in ranks_by_node]
        with self._lock:
            self._begun[fault.id] = ranks_by_node
            if isinstance(fault.trigger, After) and not all(channel.left.is_set() for channel in channels):
                self._ordered.add(fault.id)
        for channel in channels:
            channel.tell("start", fault=fault.id, ranks=list(ranks_by_node[channel.node]))

    def submitted_again(self) -> None:
        """Must be called before another submission: faults that an agent was told to apply at once are not sent again
        to the new agents."""
        with self._lock:
            for fault in self._ordered:
                self._begun.pop(fault, None)

    def begun_on(self, node: int) -> list[str]:
        with self._lock:
            return [fault for fault, ranks_by_node in self._begun.items() if node in ranks_by_node]

    def send_state(self, channel: NodeChannel) -> None:
        """Sends an agent all words of control pages, and all faults that have begun. It is called whenever an agent has
        connected."""
        with self._lock:
            words, begun = list(self._words.items()), dict(self._begun)
        for (fault, rank, word), value in words:
            channel.tell("page", fault=fault, rank=rank, word=word, value=value)
        for fault, ranks_by_node in begun.items():
            if channel.node in ranks_by_node:
                channel.tell("start", fault=fault, ranks=list(ranks_by_node[channel.node]))

    def write(self, fault: str, rank: int, word: int, value: int) -> None:
        """Sends a word of the control page of a fault and a rank to every node."""
        with self._lock:
            self._words.pop((fault, rank, word), None)
            self._words[fault, rank, word] = value  # in the order of writing
        for channel in self.channels():
            channel.tell("page", fault=fault, rank=rank, word=word, value=value)

    def end(self, wait_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> list[str]:
        stuck: set[str] = set()
        for channel in self.channels():
            try:
                if not channel.left.is_set():
                    stuck.update(channel.ask("end"))
            except NoAnswer:
                continue
        return sorted(stuck)

    def undo(self, fault: str) -> list[str]:
        """Undoes a fault on all nodes that have it. Each node records the result. Returns one reason for each node that
        does not answer, so that the undo there is not verified."""
        wrong = []
        with self.recovering:
            for channel in [channel for channel in self.channels() if not channel.left.is_set()]:
                try:
                    channel.ask("heal", fault=fault)
                except NoAnswer as error:
                    if not channel.left.is_set():
                        wrong.append(str(error))
        return wrong

    def note(self, event: Event) -> None:
        """If the event reports that a fault has fired on a node, tells the pages of the other nodes, so that the fault
        does not fire there, too."""
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

    def _ranks_by_node(self, fault: PlannedFault) -> Mapping[int, Sequence[int]]:
        """The nodes that take part in a fault, each with the ranks of the target that it may hit there."""
        everywhere = {channel.node: fault.target.ranks for channel in self.channels()}
        if fault.where == "rank":
            return everywhere
        if fault.target.nodes:
            return dict.fromkeys(fault.target.nodes, fault.target.ranks)
        if not isinstance(fault.trigger, After):
            return everywhere  # the pacer is on one of these nodes
        if not fault.target.ranks:
            return {0: ()}
        ranks, ranks_by_node = self.ranks(), dict[int, list[int]]()
        for rank in fault.target.ranks:
            if rank not in ranks:
                raise ChaosError(f"rank {rank} has no process now")
            ranks_by_node.setdefault(ranks[rank].node, []).append(rank)
        return ranks_by_node
