"""The places at which each rank can be when the job dies, and which places of several ranks can occur together. All
moments between two changes of files count as one, and so do all moments in the middle of writing a file. So the
operations of a rank have only a few places, called *stands*. A rank may be at a stand only if other ranks have got far
enough."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torchaos.harness.exploring.operations import Kind, Operation, Recording
from torchaos.harness.exploring.states.world import Effect, World

_PAGE = 4096  # bytes; a longer write may be cut short by the death of its process
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Stand:
    """A place of a rank: it has done its first `low` to `high` operations, which all count as one. The files are those
    after `done` operations."""

    low: int
    high: int
    done: int
    files: int  # equal for stands of a rank with equal files, except for the length to which a file is written
    half: int | None  # the number of the write of which only a part was done
    needs: Mapping[int | None, int]  # how many operations other ranks must have done

    @property
    def moments(self) -> int:
        """The number of points in time, between two operations of the rank, at which it stands here."""
        return 0 if self.half is not None else self.high - self.low + 1


@dataclass(frozen=True)
class Line:
    """A rank, and its stands in order."""

    rank: int | None
    stands: tuple[Stand, ...]
    shape: tuple[tuple[Effect, ...], ...]  # the changes from each stand to the next

    def first(self, least: int) -> int:
        """The index of the first stand at which at least `least` operations are done."""
        return next(index for index, stand in enumerate(self.stands) if stand.low >= least and stand.half is None)


def lines(recording: Recording, world: World) -> tuple[Line, ...]:
    """The stands of each rank."""
    before = set(recording.before)
    before |= {(need, effect.operation.number) for effect in world.effects for need in effect.needs}
    ranks = {operation.number: operation.rank for operation in recording.operations}
    pairs = [(a, b) for a, b in before if a in ranks and b in ranks and ranks[a] != ranks[b]]
    wanted: dict[int, dict[int | None, int]] = {}
    for a, b in pairs:
        needs = wanted.setdefault(b, {})
        needs[ranks[a]] = max(needs.get(ranks[a], 0), world.index[a] + 1)
    waited = {a for a, _b in pairs}
    effects = {effect.operation.number: effect for effect in world.effects}
    return tuple(
        _line(rank, [effects[operation.number] for operation in line], wanted, waited)
        for rank, line in recording.lines.items()
    )


def _line(
    rank: int | None, effects: list[Effect], wanted: Mapping[int, Mapping[int | None, int]], waited: set[int]
) -> Line:
    keys, halves = _keys(effects)
    numbers: dict[object, int] = {}
    stands: list[Stand] = []
    shape: list[tuple[Effect, ...]] = []
    needs: dict[int | None, int] = {}
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
        if keys[index] == keys[index + 1] and number not in waited and number not in wanted and half is None:
            continue
        close(index)
        for other, least in wanted.get(number, {}).items():
            needs[other] = max(needs.get(other, 0), least)
        if half is not None:
            stands.append(Stand(index, index, index, numbers.setdefault(half, len(numbers)), number, dict(needs)))
            shape.append(())
    close(len(effects))
    return Line(rank, tuple(stands), tuple(shape))


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
    if line.rank is None or other.rank is None or len(line.stands) != len(other.stands):
        return False
    swap: dict[int | None, int | None] = {line.rank: other.rank, other.rank: line.rank}
    by_rank = {line.rank: line for line in all_}

    def swapped(needs: Mapping[int | None, int]) -> dict[int | None, int]:
        return {swap.get(rank, rank): by_rank[rank].first(least) for rank, least in needs.items()}

    def plain(needs: Mapping[int | None, int]) -> dict[int | None, int]:
        return {rank: by_rank[rank].first(least) for rank, least in needs.items()}

    for mine, theirs, my_way, their_way in zip(line.stands, other.stands, line.shape, other.shape, strict=True):
        if mine.files != theirs.files or swapped(mine.needs) != plain(theirs.needs):
            return False
        if not _same_way(my_way, line.rank, their_way, other.rank):
            return False
    rest = (line for line in all_ if line.rank not in swap)
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
