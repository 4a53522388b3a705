"""The places at which each rank can be when the job dies, and which places of several ranks can occur together.
Operations whose order never changes are in one chain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchaos.harness.crash_explorer.operations import Operation, OperationKind, Recording
from torchaos.harness.crash_explorer.states.fs_model import Effect, World

# Sorts the operations of a recording into *ways*: sequences whose order never changes. Each rank has a way. A folder or
# a file that several ranks use is made by the rank that comes first, which is chance: another rank could have made it.
# So the operations by which a rank makes such things are a way of their own. This changes no order: an operation still
# comes after what its rank did before, and before what its rank did later. But the ranks that use the folder then
# differ in nothing.

Name = int | str | None  # a rank, None: processes of no rank; a string: what a rank makes that others use
_MOVES = (OperationKind.RENAME, OperationKind.UNLINK, OperationKind.RMDIR)
Counts = Mapping[Name, int]  # by way: how many of its operations


@dataclass
class Way:
    """A sequence of operations. `needs`: how many operations of other ways come before an operation, by its number;
    only if they are more than before the operation of this way that precedes it."""

    name: Name
    by: int | None  # the rank that did the operations
    effects: list[Effect] = field(default_factory=list)
    done: list[int] = field(default_factory=lambda: [0])  # by the number of done operations of this way: of the rank
    needs: dict[int, Counts] = field(default_factory=dict)


def ways(recording: Recording, world: World) -> tuple[Way, ...]:
    """The ways, those of ranks first. Needs are complete: an operation also needs what its needs need."""
    sources: dict[int, set[int]] = {effect.operation.number: set(effect.needs) for effect in world.effects}
    for a, b in recording.before:
        if b in sources:
            sources[b].add(a)
    shared = _shared(world)
    found: dict[Name, Way] = {rank: Way(rank, rank) for rank in recording.lines}
    pasts: dict[int, dict[Name, int]] = {}  # by operation: what comes before its end
    last: dict[int | None, int] = {}  # the last operation of each rank
    for effect in world.effects:
        number, rank = effect.operation.number, effect.operation.rank
        past: dict[Name, int] = {}
        for source in (*sources[number], *([last[rank]] if rank in last else ())):
            for name, count in pasts.get(source, {}).items():
                past[name] = max(past.get(name, 0), count)
        way = found[rank]
        if number in shared:
            way = found.setdefault(f"shared, by {rank}", Way(f"shared, by {rank}", rank))
        before = pasts[way.effects[-1].operation.number] if way.effects else {}
        needs = {name: count for name, count in past.items() if name != way.name}
        if any(count > before.get(name, 0) for name, count in needs.items()):
            way.needs[number] = needs
        way.effects.append(effect)
        way.done.append(world.index[number] + 1)
        pasts[number], last[rank] = {**past, way.name: len(way.effects)}, number
    return tuple(found.values())


def _shared(world: World) -> set[int]:
    """The operations that make a file or folder that another rank uses, other than to rename or remove it."""
    makers = {
        effect.operation.number: effect.operation.rank
        for effect in world.effects
        if effect.entries and effect.operation.kind in (OperationKind.MKDIR, OperationKind.CREATE)
    }
    return {
        need
        for effect in world.effects
        if effect.operation.kind not in _MOVES
        for need in effect.needs
        if need in makers and makers[need] != effect.operation.rank
    }


# The places at which each rank can be when the job dies, and which places of several ranks can occur together. All
# moments between two changes of files count as one, and so do all moments in the middle of writing a file. So the
# operations of a rank, or of another way, have only a few places, called *stands*. A rank may be at a stand only if
# other ranks have got far enough.

_PAGE = 4096  # bytes; a longer write may be cut short by the death of its process
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Stand:
    """A place of a way: its first `low` to `high` operations are done, which all count as one. The files are those
    after `done` operations."""

    low: int
    high: int
    done: int
    files: int  # equal for stands of a rank with equal files, except for the length to which a file is written
    half: int | None  # the number of the write of which only a part was done
    needs: Counts  # how many operations of other ways must be done

    @property
    def moments(self) -> int:
        """The number of points in time, between two operations of the rank, at which it stands here."""
        return 0 if self.half is not None else self.high - self.low + 1


@dataclass(frozen=True)
class Line:
    """A way, and its stands in order."""

    name: Name
    by: int | None  # the rank that does the operations
    done: tuple[int, ...]  # by the number of done operations of this way: the number of all operations of the rank
    stands: tuple[Stand, ...]
    shape: tuple[tuple[Effect, ...], ...]  # the changes from each stand to the next

    def first(self, least: int) -> int:
        """The index of the first stand at which at least `least` operations are done."""
        return next(index for index, stand in enumerate(self.stands) if stand.low >= least and stand.half is None)


def lines(recording: Recording, world: World) -> tuple[Line, ...]:
    """The stands of each way."""
    found = ways(recording, world)
    by_name = {way.name: way for way in found}
    waited = {
        by_name[name].effects[count - 1].operation.number
        for way in found
        for needs in way.needs.values()
        for name, count in needs.items()
    }
    return tuple(_line(way, waited) for way in found)


def _line(way: Way, waited: set[int]) -> Line:
    effects = way.effects
    keys, halves = _keys(effects)
    numbers: dict[object, int] = {}
    stands: list[Stand] = []
    shape: list[tuple[Effect, ...]] = []
    needs: dict[Name, int] = {}
    low, passed = 0, 0

    def close(high: int) -> None:
        nonlocal low, passed
        torn = bool(keys[low][1])
        done = (low + high) // 2 if torn else high
        stands.append(Stand(low, high, done, numbers.setdefault(keys[low], len(numbers)), None, dict(needs)))
        shape.append(tuple(effect for effect in effects[passed:low] if effect.visible))
        low, passed = high + 1, low

    for index, effect in enumerate(effects):
        number = effect.operation.number
        half = halves.get(index)
        if keys[index] == keys[index + 1] and number not in waited and number not in way.needs and half is None:
            continue
        close(index)
        needs |= way.needs.get(number, {})
        if half is not None:
            stands.append(Stand(index, index, index, numbers.setdefault(half, len(numbers)), number, dict(needs)))
            shape.append(())
    close(len(effects))
    return Line(way.name, way.by, tuple(way.done), tuple(stands), tuple(shape))


def _keys(effects: list[Effect]) -> tuple[list[tuple[object, ...]], dict[int, object]]:
    """Keys that distinguish the files after each number of operations: changes of names so far, files written in full,
    and files in the middle of being written. And, by index, the writes that may be torn although they write the whole
    file."""
    episodes: list[list[int]] = []  # indices of the writes of a file without a sync, close or rename between them
    open_: dict[int, list[int]] = {}
    for index, effect in enumerate(effects):
        if effect.data and effect.node is not None:
            if effect.node not in open_:
                episodes.append(open_.setdefault(effect.node, []))
            open_[effect.node].append(index)
        elif effect.node is not None and effect.operation.kind is not OperationKind.OPEN:
            open_.pop(effect.node, None)
    ends = {episode[-1]: number for number, episode in enumerate(episodes)}
    starts = {episode[0]: number for number, episode in enumerate(episodes) if len(episode) > 1}
    keys: list[tuple[object, ...]] = []
    names, whole, torn = 0, 0, frozenset[int]()
    halves: dict[int, object] = {}
    keys.append((names, torn, whole))
    for index, effect in enumerate(effects):
        names += bool(effect.entries)
        if index in starts:
            torn |= {starts[index]}
        if index in ends:
            whole, torn = whole + 1, torn - {ends[index]}
            extent = effect.extent
            if len(episodes[ends[index]]) == 1 and extent is not None and extent.size > _PAGE:
                halves[index] = ("half", ends[index])
        keys.append((names, torn, whole))
    return keys, halves


def alike(line: Line, other: Line, all_: tuple[Line, ...]) -> bool:
    """Whether the two ranks can change places: they do the same to their own files, and wait for the same
    operations."""
    mine, theirs = line.name, other.name
    if not isinstance(mine, int) or not isinstance(theirs, int) or len(line.stands) != len(other.stands):
        return False
    swap: dict[Name, Name] = {mine: theirs, theirs: mine}
    by_name = {line.name: line for line in all_}

    def swapped(needs: Counts) -> dict[Name, int]:
        return {swap.get(name, name): by_name[name].first(least) for name, least in needs.items()}

    def plain(needs: Counts) -> dict[Name, int]:
        return {name: by_name[name].first(least) for name, least in needs.items()}

    for here, there, my_way, their_way in zip(line.stands, other.stands, line.shape, other.shape, strict=True):
        if here.files != there.files or swapped(here.needs) != plain(there.needs):
            return False
        if not _same_way(my_way, mine, their_way, theirs):
            return False
    rest = (line for line in all_ if line.name not in swap)
    return all(swapped(stand.needs) == plain(stand.needs) for line in rest for stand in line.stands)


def _same_way(way: tuple[Effect, ...], rank: int, other: tuple[Effect, ...], its: int) -> bool:
    """Whether these changes are the same, except for the rank's number in names, and for sizes."""
    mine, theirs = _steps(way), _steps(other)
    return len(mine) == len(theirs) and all(
        a.kind is b.kind and _same_name(a.path, rank, b.path, its) and _same_name(a.to or "", rank, b.to or "", its)
        for a, b in zip(mine, theirs, strict=True)
    )


def _steps(way: tuple[Effect, ...]) -> list[Operation]:
    """The operations, with several writes to one file as one write, because their number depends on the size."""
    steps: list[Operation] = []
    for effect in way:
        last = steps[-1] if steps else None
        if last is None or effect.operation.kind is not OperationKind.WRITE or last.kind is not OperationKind.WRITE or (
            last.path != effect.operation.path
        ):  # fmt: skip
            steps.append(effect.operation)
    return steps


def _same_name(name: str, rank: int, other: str, its: int) -> bool:
    mine, theirs = _DIGITS.split(name), _DIGITS.split(other)
    return len(mine) == len(theirs) and all(
        a == b or (a.isdigit() and b.isdigit() and int(a) == rank and int(b) == its)
        for a, b in zip(mine, theirs, strict=True)
    )
