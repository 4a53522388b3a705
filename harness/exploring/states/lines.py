"""The places at which each rank can be when the job dies, and which places of several ranks can occur together. All
moments between two changes of files count as one, and so do all moments in the middle of writing a file. So the
operations of a rank, or of another way (ways.py), have only a few places, called *stands*. A rank may be at a stand
only if other ranks have got far enough."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchaos.harness.exploring.operations import Kind, Operation, Recording
from torchaos.harness.exploring.states.ways import Counts, Name, Way, ways
from torchaos.harness.exploring.states.world import Effect, World

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
        elif effect.node is not None and effect.operation.kind is not Kind.OPEN:
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
        if last is None or effect.operation.kind is not Kind.WRITE or last.kind is not Kind.WRITE or (
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
