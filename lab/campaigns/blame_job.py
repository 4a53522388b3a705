"""A small model of a training job, for blame.py: the calls of each rank and their times, with or without a fault.

A rank's host executes its program: it gives work and collectives to its device, and runs ahead until a `sync`. The
device executes them in order. A collective starts on a rank when everything before it has ended there, and ends on all
ranks shortly after the last member has started it. If the members disagree about operation or size, it never ends. With
`overlap`, the gradients' collectives have a stream of their own, as in DDP and Megatron."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NEVER = math.inf
STALLS = ("host", "gone", "device", "half done")
CALLS = ("skip", "operation", "size", "order")


@dataclass
class Item:
    """One line of a program. `kind`: work, pause, sync, join (of the streams), send, recv, or the name of a collective;
    `seconds`: the duration of work; `peer`: the other rank of a message."""

    kind: str
    group: str = ""
    size: int = 0
    seconds: float = 0.0
    peer: int = -1
    stream: str = "main"
    # The times of the item's events; NEVER: not yet, or never.
    called_s: float = NEVER
    ready_s: float = NEVER
    over_s: float = NEVER
    seq: int = 0
    before: list[Item] = field(default_factory=list)

    @property
    def is_call(self) -> bool:
        return self.kind not in ("work", "pause", "sync", "join")

    @property
    def is_message(self) -> bool:
        return self.kind in ("send", "recv")


@dataclass
class Fault:
    kind: str
    rank: int
    at: int  # the place in the rank's program
    landed: bool = False


@dataclass
class Layout:
    """The ranks in Megatron's order: the tensor-parallel index varies fastest, then data, then pipeline."""

    tp: int
    dp: int
    pp: int
    blocking: bool  # each call returns only when it has ended, as with gloo
    overlap: bool
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp

    def __post_init__(self) -> None:
        self.groups["0"] = tuple(range(self.world))
        for size, name in ((self.tp, "tp"), (self.dp, "dp"), (self.pp, "pp")):
            if size > 1:
                for rank in range(self.world):
                    self.groups[self.group(name, rank)] = self._line(name, rank)

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank % self.tp, rank // self.tp % self.dp, rank // self.tp // self.dp

    def rank(self, t: int, d: int, p: int) -> int:
        return t + self.tp * (d + self.dp * p)

    def _line(self, name: str, rank: int) -> tuple[int, ...]:
        t, d, p = self.place(rank)
        if name == "tp":
            return tuple(self.rank(n, d, p) for n in range(self.tp))
        if name == "dp":
            return tuple(self.rank(t, n, p) for n in range(self.dp))
        return tuple(self.rank(t, d, n) for n in range(self.pp))

    def group(self, name: str, rank: int) -> str:
        """The name of the rank's group of this kind: a number, equal on all members, as torch counts groups."""
        lines = sorted({self._line(name, other) for other in range(self.world)})
        first = {"tp": 1, "dp": 1 + self.world, "pp": 1 + 2 * self.world}[name]
        return str(first + lines.index(self._line(name, rank)))


def program(layout: Layout, rank: int, steps: int, pace_s: float, uneven: float, draw: random.Random) -> list[Item]:
    """The program of a rank. `pace_s`: seconds of work per layer; `uneven`: its relative standard deviation. The
    programs of all ranks match; their times differ."""
    t, d, p = layout.place(rank)
    items: list[Item] = []
    shape = random.Random(f"{layout.world} {layout.tp} {layout.pp}")  # the same for all ranks
    layers, micro, buckets = shape.randint(1, 3), shape.randint(1, 4), shape.randint(1, 3)

    def add(kind: str, group: str = "", **more: object) -> None:
        items.append(Item(kind, group, **more))  # type: ignore[arg-type]
        if layout.blocking and items[-1].is_call and kind != "send":
            items.append(Item("sync"))

    def work(times: float = 1.0) -> None:
        add("work", seconds=max(1e-5, draw.gauss(times * pace_s, times * pace_s * uneven)))

    def tensor(kind: str, size: int) -> None:
        if layout.tp > 1:
            add(kind, layout.group("tp", rank), size=size)

    def message(kind: str, to: int) -> None:
        if 0 <= to < layout.pp:
            add(kind, layout.group("pp", rank), size=512, peer=layout.rank(t, d, to))

    for step in range(steps):
        for _ in range(micro):
            message("recv", p - 1)
            for _ in range(layers):
                work()
                tensor("all_gather_base", 256)
                work()
                tensor("reduce_scatter_base", 256)
            message("send", p + 1)
        for _ in range(micro):
            message("recv", p + 1)
            for _ in range(layers):
                work(2)
                tensor("all_reduce", 128)
            message("send", p - 1)
        if layout.dp > 1:
            stream = "dp" if layout.overlap else "main"
            for bucket in range(buckets):
                add("all_reduce", layout.group("dp", rank), size=1000 + bucket, stream=stream)
                work(0.5)
        add("join")
        add("all_reduce", "0", size=1)
        add("sync")
        if step % 7 == 5:
            if rank == 0:
                add("pause", seconds=20 * pace_s)  # a checkpoint by rank 0
            add("barrier", "0", size=1)
            add("sync")
    return [item for item in items if item.kind != "join" or layout.overlap]


class Job:
    def __init__(self, layout: Layout, programs: Mapping[int, list[Item]], faults: Sequence[Fault] = ()) -> None:
        self.layout, self.programs, self.faults = layout, programs, faults
        self._stop = {fault.rank: fault for fault in faults if fault.kind in STALLS}
        self._places = dict.fromkeys(programs, 0)  # where in its program each host is
        self._clocks = dict.fromkeys(programs, 0.0)
        self._newest: dict[int, dict[str, Item]] = {rank: {} for rank in programs}  # by stream
        self._queues: dict[int, list[Item]] = {rank: [] for rank in programs}  # items that each device has not ended
        self._numbers: dict[tuple[object, ...], int] = defaultdict(int)
        self._met: dict[tuple[object, ...], dict[int, Item]] = defaultdict(dict)
        for fault in faults:
            if fault.kind in CALLS:
                _miscall(programs[fault.rank], fault)

    def run(self) -> Job:
        moved = True
        while moved:
            moved = False
            for rank, items in self.programs.items():
                while self._places[rank] < len(items) and self._host(rank):
                    moved = True
            for rank, queue in self._queues.items():
                moved = sum(self._device(rank, item) for item in queue) > 0 or moved
                self._queues[rank] = [item for item in queue if item.over_s == NEVER]
        return self

    def _host(self, rank: int) -> bool:
        """Executes the next line of a host's program. Returns whether that was possible."""
        item, fault, newest = self.programs[rank][self._places[rank]], self._stop.get(rank), self._newest[rank]
        if fault and self._places[rank] == fault.at:
            fault.landed = True
            if fault.kind in ("host", "gone"):
                return False
        if item.kind == "sync":
            end = max((call.over_s for call in newest.values()), default=0.0)
            if end == NEVER:
                return False
            self._clocks[rank] = max(self._clocks[rank], end)
        elif item.kind == "pause":
            item.called_s, item.over_s = self._clocks[rank], self._clocks[rank] + item.seconds
            self._clocks[rank] = item.over_s
        else:
            self._clocks[rank] += 2e-5 if item.is_call else 1e-5
            item.called_s = self._clocks[rank]
            item.before = [
                call for name, call in newest.items() if name in ("main", item.stream) or item.kind == "join"
            ]
            newest[item.stream] = item
            self._queues[rank].append(item)
            if item.is_call:
                about = self._about(rank, item)
                counter = (rank, *about)
                self._numbers[counter] += 1
                item.seq = self._numbers[counter]
                self._sides(rank, item)[rank] = item
        self._places[rank] += 1
        return True

    def _about(self, rank: int, item: Item) -> tuple[object, ...]:
        """The key by which calls are counted: a group, or the messages from one rank to another."""
        if not item.is_message:
            return (item.group,)
        return (item.group, rank, item.peer) if item.kind == "send" else (item.group, item.peer, rank)

    def _sides(self, rank: int, item: Item) -> dict[int, Item]:
        """The calls of this op that were made so far, by rank."""
        key = (*self._about(rank, item), item.seq)
        return self._met[key]

    def _device(self, rank: int, item: Item) -> bool:
        """Executes an item on a rank's device. Returns whether its state changed."""
        if item.ready_s < NEVER:
            return False
        since, fault = max([item.called_s, *(earlier.over_s for earlier in item.before)]), self._stop.get(rank)
        dead = fault and fault.kind == "device" and fault.landed and item in self.programs[rank][fault.at :]
        if since == NEVER or dead:
            return False
        item.ready_s = since
        if item.is_call:
            self._meet(self._sides(rank, item), item)
        else:
            item.over_s = since + item.seconds
        return True

    def _meet(self, here: Mapping[int, Item], item: Item) -> None:
        """Ends an op on all ranks, if all have started it and agree about it."""
        many = 2 if item.is_message else len(self.layout.groups[item.group])
        kinds = {("message" if call.is_message else call.kind, call.size) for call in here.values()}
        if len(here) == many and len(kinds) == 1 and all(call.ready_s < NEVER for call in here.values()):
            end = max(call.ready_s for call in here.values()) + 1e-4
            for rank, call in here.items():
                fault = self._stop.get(rank)
                stuck = fault and fault.kind == "half done" and fault.landed and call is self._first_call(fault)
                call.over_s = NEVER if stuck else end

    def _first_call(self, fault: Fault) -> Item | None:
        return next(
            (item for item in self.programs[fault.rank][fault.at :] if item.is_call and not item.is_message), None
        )

    @property
    def hangs(self) -> bool:
        return any(item.called_s == NEVER or item.over_s == NEVER for items in self.programs.values()
                   for item in items if item.is_call)  # fmt: skip

    def pauses(self, at_s: float) -> bool:
        """Whether rank 0 writes its checkpoint at this time, so that the others may wait for it."""
        return any(item.kind == "pause" and item.called_s <= at_s <= item.over_s for item in self.programs[0])

    @property
    def moments(self) -> list[float]:
        """The times of all events, in order, in seconds."""
        return sorted(t for items in self.programs.values() for item in items if item.is_call
                      for t in (item.called_s, item.over_s) if t < NEVER)  # fmt: skip


def _miscall(items: list[Item], fault: Fault) -> None:
    """Skips, changes or swaps the next collective of the program after the fault's place."""
    at = next((n for n, item in enumerate(items) if n >= fault.at and item.is_call and not item.is_message), None)
    if at is None:
        return
    if fault.kind == "skip":
        del items[at]
    elif fault.kind == "operation":
        items[at].kind = "broadcast" if items[at].kind != "broadcast" else "all_reduce"
    elif fault.kind == "size":
        items[at].size += 8
    else:
        other = next((n for n, item in enumerate(items) if n > at and item.is_call and not item.is_message
                      and item.group != items[at].group), None)  # fmt: skip
        if other is None:
            return
        items[at], items[other] = items[other], items[at]
    fault.landed = True
