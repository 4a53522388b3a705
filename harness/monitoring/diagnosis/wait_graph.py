"""The recorded collectives of all ranks of a job, and the graph of waits between them: which ranks and collectives wait
for which, across all process groups.

Flight Recorder dumps and the agent's stamps are both converted to this form.

An *op* is one collective, or one send with its recv. An op waits for each rank that has not entered it. A device
executes ops in order. So an op also waits for the earlier ops that are still under way on a rank that has entered it.
The nodes at the ends of these chains hold up all others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchaos.harness.protocol.collective_stamps import MESSAGES, Stamp, ranges_of, read_folder

_MUTUAL = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "alltoall", "barrier")


@dataclass(frozen=True)
class Call:
    """One collective that a rank called, or a send or recv."""

    order: int  # the position among the calls of the rank
    group: str
    op: str  # all_reduce, all_gather, ..., send, recv
    seq: int  # the number in the group; all ranks of the group give it the same, except for a send or recv
    pair: tuple[int, int] | None = None  # of a send or recv: source and destination, global ranks
    done: bool = False
    started: bool = False  # seen to start on the device
    created_s: float | None = None  # seconds since the epoch or CLOCK_MONOTONIC, on the clock of the rank's host
    shape: tuple[object, ...] = ()  # sizes and types that must be equal on all ranks; empty: unknown, or may differ
    where: str = ""  # the user's line of code
    about: str = ""  # the group in words
    timeout_s: float | None = None  # of the process group
    inside: bool = False  # the call has not returned from torch
    paired: bool = False  # of a send or recv: its `seq` is also that of the recv or send that belongs to it


@dataclass(frozen=True)
class RankCalls:
    """The record of one rank. `entered`, `completed`: the highest numbers that the rank has entered and completed, by
    group. They matter for groups whose calls are not all in `calls`."""

    rank: int
    calls: Sequence[Call]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # the members of groups, if known
    entered: Mapping[str, int] = field(default_factory=dict)
    completed: Mapping[str, int] = field(default_factory=dict)
    written_s: float | None = None  # the latest possible time of the recording, on the clock of `created_s`
    clipped: bool = False  # older calls are missing
    torn: bool = False  # newer calls may be missing
    moving: bool = False  # a call of the rank ended just before the recording
    copied: bool = False  # `written_s` may be the time of a copy, much later than the recording

    @property
    def says_nothing(self) -> bool:
        return not self.calls and not self.entered


@dataclass(frozen=True)
class Calls:
    ranks: Mapping[int, RankCalls]
    problems: tuple[str, ...] = ()
    world: tuple[int, ...] = ()  # all known ranks of the job
    unreadable: frozenset[int] = frozenset()  # ranks with a record that can't be read


def is_mutual(op: str) -> bool:
    """Whether no rank can end the op before all ranks have entered it. False for a broadcast or a send, where the
    source can end first."""
    return op.startswith(_MUTUAL)


def ranges(ranks: Sequence[int]) -> str:
    """Ranks in words, such as `rank 3` or `ranks 0-2, 7`."""
    text = ", ".join(
        f"{low}-{high}" if high > low + 1 else f"{low}, {high}" if high > low else f"{low}"
        for low, high in ranges_of(sorted(ranks))
    )
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def read_stamps(folder: Path, now_s: float | None = None) -> Calls:
    """The calls from the stamps in a folder; for each rank, those of its latest process. `now_s`: the present time
    (CLOCK_MONOTONIC), if the stamps are being written now; None: the time of recording is not known."""
    newest: dict[int, list[Stamp]] = {}
    for stamps in read_folder(folder):
        if stamps and _when(stamps) > _when(newest.get(stamps[0].rank, [])):
            newest[stamps[0].rank] = stamps
    return of_stamps(newest.values(), now_s)


def of_stamps(by_rank: Iterable[list[Stamp]], now_s: float | None = None) -> Calls:
    """The calls from lists of stamps, one list for each rank."""
    ranks, world = {}, set()
    for stamps in by_rank:
        rank = stamps[0].rank
        calls = [_call(stamp) for stamp in stamps]
        groups = {stamp.group: stamp.ranks for stamp in stamps if stamp.ranks and stamp.op not in MESSAGES}
        ranks[rank] = RankCalls(rank, calls, groups, {}, {}, now_s, stamps[0].number > 1)
        world |= {rank, *(member for stamp in stamps for member in stamp.ranks or ())}
    return Calls(ranks, (), tuple(sorted(world)))


def _call(stamp: Stamp) -> Call:
    about = f"group {stamp.group}" if stamp.ranks is None else f"group {stamp.group} of {len(stamp.ranks)}"
    group = stamp.group.partition(" ")[0] if stamp.op in MESSAGES else stamp.group
    return Call(
        stamp.number, group, stamp.op, stamp.seq, stamp.pair, done=not stamp.open,
        inside=stamp.returned_mono_s is None, created_s=stamp.start_mono_s, paired=stamp.op in MESSAGES,
        about=f"group {group}" if stamp.op in MESSAGES else about,
    )  # fmt: skip


def _when(stamps: list[Stamp]) -> float:
    return stamps[-1].start_mono_s if stamps else -1.0


_MOST_UNDER_WAY = 64
Node = Hashable  # a rank (int), the key of an op, or a `Late`


@dataclass
class Op:
    """An op in which at least one rank is now. Each rank of the op is in exactly one of `pending`, `done`, `missing`
    and `unknown`."""

    key: tuple[object, ...]
    name: str  # in words
    kind: str
    seq: int
    pending: dict[int, Call] = field(default_factory=dict)
    done: dict[int, Call | None] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)  # ranks without a record

    @property
    def members(self) -> set[int]:
        return {*self.pending, *self.done, *self.missing, *self.unknown}


@dataclass
class Group:
    """One process group, from the records of its members."""

    name: str
    members: tuple[int, ...]
    sure: bool  # whether the members are recorded, and not only inferred from the calls
    calls: dict[int, dict[int, Call]]  # by rank and number; of a call with several parts, the last part
    last: dict[int, int]  # the highest number that each rank with a record has entered

    @property
    def description(self) -> str:
        """The description that the job gave to the group. Groups of the same kind share it. Empty if there is none."""
        call = next((call for calls in self.calls.values() for call in calls.values()), None)
        return call.about.removesuffix(f" ({self.name})") if call and call.about.endswith(")") else ""

    def most_done(self) -> dict[int, int]:
        """The highest number that each rank has completed. -1 if none."""
        return {
            rank: max((n for n, call in calls.items() if call.done), default=-1) for rank, calls in self.calls.items()
        }


def groups_of(calls: Calls) -> dict[str, Group]:
    """All process groups in which a collective was recorded, by name."""
    members: dict[str, set[int]] = defaultdict(set)
    known: dict[str, set[int]] = defaultdict(set)
    numbers: dict[str, dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    for rank, record in calls.ranks.items():
        for name, ranks in record.groups.items():
            known[name].update(ranks)
        for call in record.calls:
            if call.op not in MESSAGES:
                numbers[call.group][rank][call.seq] = call
                members[call.group].add(rank)
                if "default_pg" in call.about and not known[call.group]:
                    known[call.group].update(calls.world)
    found = {}
    for name, by_rank in numbers.items():
        everybody = tuple(sorted(known[name] | members[name] if known[name] else members[name]))
        last = {}
        for rank in everybody:
            if own := calls.ranks.get(rank):
                status = own.entered.get(name)
                if status is None and own.torn:
                    continue  # the last call of the rank is not known
                last[rank] = max(max(by_rank.get(rank, {}), default=-1), -1 if status is None else status)
        _fill(calls, name, by_rank, last)
        found[name] = Group(name, everybody, bool(known[name]), dict(by_rank), last)
    return found


def _fill(calls: Calls, name: str, by_rank: dict[int, dict[int, Call]], last: Mapping[int, int]) -> None:
    """Adds calls to torn records: the calls that are under way according to the record's status."""
    for rank, top in last.items():
        record = calls.ranks[rank]
        if record.torn and (done := record.completed.get(name)) is not None:
            sample = next(iter(next(iter(by_rank.values())).values()))
            for number in range(max(done + 1, top - _MOST_UNDER_WAY), top + 1):
                whole = next((c[number] for c in by_rank.values() if number in c), sample)
                by_rank.setdefault(rank, {}).setdefault(
                    number, replace(whole, order=-1, created_s=None, where="", shape=())
                )


def collectives(groups: Mapping[str, Group]) -> list[Op]:
    """The collectives that at least one rank is in now."""
    found = []
    for group in groups.values():
        open_ = sorted({n for calls in group.calls.values() for n, call in calls.items() if not call.done})
        for number in open_:
            kinds = [calls[number] for calls in group.calls.values() if number in calls]
            call = kinds[0]
            op = Op((group.name, number), f"{call.op} {number} of {call.about or group.name}", call.op, number)
            for rank in group.members:
                mine = group.calls.get(rank, {}).get(number)
                if mine is not None and not mine.done:
                    op.pending[rank] = mine
                elif mine is None and rank not in group.last:
                    op.unknown.add(rank)
                elif mine is not None or number <= group.last[rank]:
                    op.done[rank] = mine
                else:
                    op.missing.add(rank)
            found.append(op)
    return found


def messages(calls: Calls) -> list[Op]:
    """The sends and recvs that at least one rank is in now. Between two ranks of a group, sends and recvs are matched
    by their numbers, if these are the same on both sides, or else in order. If older calls are missing, only those that
    are under way on both sides are matched in order, the oldest first."""
    sides: dict[tuple[str, int, int], dict[str, list[Call]]] = defaultdict(lambda: {"send": [], "recv": []})
    for record in calls.ranks.values():
        for call in record.calls:
            if call.pair and call.op in MESSAGES:
                source, target = call.pair
                sides[call.group, source, target][call.op].append(call)
    found = []
    for (group, source, target), both in sides.items():
        whole = all(rank in calls.ranks and not calls.ranks[rank].clipped for rank in (source, target))
        sends, recvs = (_numbered(both[side], whole) for side in MESSAGES)
        for index in sorted(sends.keys() | recvs.keys()):
            here = {source: sends.get(index), target: recvs.get(index)}
            if any(call is not None and not call.done for call in here.values()):
                over = {rank for rank, own in ((source, sends), (target, recvs)) if index < min(own, default=index)}
                found.append(_message(calls, (group, source, target, index), here, over))
    return found


def _numbered(side: Sequence[Call], whole: bool) -> dict[int, Call]:
    """The sends or the recvs between two ranks, by the number with which they are matched."""
    if all(call.paired for call in side):
        return {call.seq: call for call in side}
    return dict(enumerate(side if whole else [call for call in side if not call.done]))


def _message(
    calls: Calls, key: tuple[str, int, int, int], here: Mapping[int, Call | None], over: Collection[int]
) -> Op:
    """The op of a send, a recv, or both. `over`: the ranks whose part of the op ended before their record begins."""
    group, source, target, index = key
    about = next((call.about for call in here.values() if call), group)
    op = Op(key, f"send {source} -> {target} of {about or group}", "send", index)
    for rank, call in here.items():
        if call is not None:
            side: dict[int, Any] = op.done if call.done else op.pending
            side[rank] = call
        elif rank in over:
            op.done[rank] = None
        else:
            (op.missing if rank in calls.ranks else op.unknown).add(rank)
    return op


@dataclass(frozen=True)
class Late:
    """A node of the graph for a rank that is still in an op which other ranks have completed."""

    rank: int


@dataclass
class Waits:
    """The graph of waits. An edge leads from a node to each node that it waits for."""

    ops: dict[Node, Op]
    edges: dict[Node, set[Node]]
    stale: set[int]  # ranks whose record is older than the others'
    late: dict[int, Op]  # by rank: the op that it is still in and others have completed; ops wait for Late(rank)
    groups: dict[str, Group] = field(default_factory=dict)

    def ends(self) -> list[set[Node]]:
        """The strongly connected components of the graph that wait for no node outside themselves."""
        return _ends(self.edges)


def waits(calls: Calls) -> Waits:
    groups = groups_of(calls)
    ops: dict[Node, Op] = {op.key: op for op in (*collectives(groups), *messages(calls))}
    late = _late(ops)
    ops = _without_what_is_over(ops, late)
    edges: dict[Node, set[Node]] = defaultdict(set)
    under_way: dict[int, list[tuple[int, Node]]] = defaultdict(list)
    for key, op in ops.items():
        edges[key].update({*op.missing, *op.unknown, *(Late(rank) for rank in op.done.keys() & late.keys())})
        for rank, call in op.pending.items():
            if call.order >= 0:
                under_way[rank].append((call.order, key))
            else:  # from the status of a torn record: the order of the calls is not known
                edges[rank].add(key)
        for rank in (*op.missing, *op.unknown):
            edges.setdefault(rank, set())
    for rank, mine in under_way.items():
        mine.sort(key=lambda pair: pair[0])
        chain: list[Node] = [Late(rank)] if rank in late else []
        chain += [key for _, key in mine]
        for before, after in pairwise(chain):
            edges[after].add(before)
        edges[rank].add(chain[-1])
    for rank in late:
        edges[rank].add(Late(rank))
        edges.setdefault(Late(rank), set())
    return Waits(ops, dict(edges), _stale(groups, ops), late, groups)


def _late(ops: Mapping[Node, Op]) -> dict[int, Op]:
    """For each rank, the last op that it is still in, alone or with a few other ranks, although all other ranks have
    completed the op."""
    found: dict[int, Op] = {}
    for op in ops.values():
        if is_mutual(op.kind) and op.done and len(op.pending) <= len(op.done) + len(op.unknown) and not op.missing:
            for rank, call in op.pending.items():
                if rank not in found or found[rank].pending[rank].order < call.order:
                    found[rank] = op
    return found


def _without_what_is_over(ops: dict[Node, Op], late: Mapping[int, Op]) -> dict[Node, Op]:
    """The ops, without calls that must have ended although their record shows them as under way. A device executes ops
    in order, so if a rank is late in an op, its earlier calls have ended."""
    kept: dict[Node, Op] = {}
    for key, op in ops.items():
        over = {
            rank for rank, call in op.pending.items() if rank in late and call.order <= late[rank].pending[rank].order
        }
        pending = {rank: call for rank, call in op.pending.items() if rank not in over}
        if pending:
            done = {**op.done, **{rank: op.pending[rank] for rank in over}}
            kept[key] = replace(op, pending=pending, done=done)
    return kept


def _stale(groups: Mapping[str, Group], ops: Mapping[Node, Op]) -> set[int]:
    """The ranks whose record is older than the others': other ranks have completed a collective that these ranks have
    not entered, by their records."""
    found = set()
    for group in groups.values():
        done = group.most_done()
        for rank, last in group.last.items():
            ahead = [
                other for other, number in done.items()
                if number > last and (call := group.calls[other].get(number)) and is_mutual(call.op)
            ]  # fmt: skip
            if ahead and last >= 0:
                found.add(rank)
    return found


def _ends(edges: Mapping[Node, set[Node]]) -> list[set[Node]]:
    """The strongly connected components that no edge leaves, by Kosaraju's algorithm. In `order`, a node of each
    component comes after all nodes that wait for it. So, from the end of `order` on, all nodes that are newly reached
    are one component."""
    back: dict[Node, set[Node]] = defaultdict(set)
    for node, others in edges.items():
        for other in others:
            back[other].add(node)
    order, reached = list[Node](), set[Node]()
    for root in [*edges, *back]:
        order += _reached_from(root, back, reached)
    found, reached = list[set[Node]](), set[Node]()
    for root in reversed(order):
        part = set(_reached_from(root, edges, reached))
        if part and all(other in part for node in part for other in edges.get(node, ())):
            found.append(part)
    return found


def _reached_from(root: Node, edges: Mapping[Node, set[Node]], reached: set[Node]) -> Iterator[Node]:
    """Yields the nodes that can be reached from the root and are not yet in `reached`, and adds them to `reached`. Each
    node comes after all nodes that are reached through it."""
    if root in reached:
        return
    reached.add(root)
    work: list[tuple[Node, Iterator[Node]]] = [(root, iter(edges.get(root, ())))]
    while work:
        node, left = work[-1]
        other = next((other for other in left if other not in reached), None)
        if other is None:
            work.pop()
            yield node
        else:
            reached.add(other)
            work.append((other, iter(edges.get(other, ()))))
