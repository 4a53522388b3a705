"""The moments at which a whole job can die, in classes: the places at which each rank can be in its operations, and
which places of several ranks can occur together.

The operations of a recording are sorted into chains, whose order never changes. Each rank has a chain. A folder or a
file that several ranks use is made by the rank that comes first, which is chance: another rank could have made it. So
the operations by which a rank makes such things are a chain of their own. This changes no order: an operation still
comes after what its rank did before, and before what its rank did later. But the ranks that use the folder then differ
in nothing.

All moments between two changes of files count as one, and so do all moments in the middle of writing a file. So a
chain has only a few places, called positions. A rank may be at a position only if other ranks have got far enough."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torchaos.harness.crash_explorer.folder_contents import Tree
from torchaos.harness.crash_explorer.fs_model import Cut, Effect, FilesystemModel
from torchaos.harness.crash_explorer.operations import Operation, OperationKind, Recording

Name = int | str | None  # a rank, None: processes of no rank; a string: what a rank makes that others use
_MOVES = (OperationKind.RENAME, OperationKind.UNLINK, OperationKind.RMDIR)
Counts = Mapping[Name, int]  # by way: how many of its operations


@dataclass
class OpChain:
    """A sequence of operations. `needs`: how many operations of other ways come before an operation, by its number;
    only if they are more than before the operation of this way that precedes it."""

    name: Name
    by: int | None  # the rank that did the operations
    effects: list[Effect] = field(default_factory=list)
    done: list[int] = field(default_factory=lambda: [0])  # by the number of done operations of this way: of the rank
    needs: dict[int, Counts] = field(default_factory=dict)


def op_chains(recording: Recording, world: FilesystemModel) -> tuple[OpChain, ...]:
    """The ways, those of ranks first. Needs are complete: an operation also needs what its needs need."""
    sources: dict[int, set[int]] = {effect.operation.number: set(effect.needs) for effect in world.effects}
    for a, b in recording.before:
        if b in sources:
            sources[b].add(a)
    shared = _shared(world)
    found: dict[Name, OpChain] = {rank: OpChain(rank, rank) for rank in recording.lines}
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
            way = found.setdefault(f"shared, by {rank}", OpChain(f"shared, by {rank}", rank))
        before = pasts[way.effects[-1].operation.number] if way.effects else {}
        needs = {name: count for name, count in past.items() if name != way.name}
        if any(count > before.get(name, 0) for name, count in needs.items()):
            way.needs[number] = needs
        way.effects.append(effect)
        way.done.append(world.index[number] + 1)
        pasts[number], last[rank] = {**past, way.name: len(way.effects)}, number
    return tuple(found.values())


def _shared(world: FilesystemModel) -> set[int]:
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


_PAGE = 4096  # bytes; a longer write may be cut short by the death of its process
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Position:
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
class RankPositions:
    """A way, and its stands in order."""

    name: Name
    by: int | None  # the rank that does the operations
    done: tuple[int, ...]  # by the number of done operations of this way: the number of all operations of the rank
    stands: tuple[Position, ...]
    shape: tuple[tuple[Effect, ...], ...]  # the changes from each stand to the next

    def first(self, least: int) -> int:
        """The index of the first stand at which at least `least` operations are done."""
        return next(index for index, stand in enumerate(self.stands) if stand.low >= least and stand.half is None)


def rank_positions(recording: Recording, world: FilesystemModel) -> tuple[RankPositions, ...]:
    """The stands of each way."""
    found = op_chains(recording, world)
    by_name = {way.name: way for way in found}
    waited = {
        by_name[name].effects[count - 1].operation.number
        for way in found
        for needs in way.needs.values()
        for name, count in needs.items()
    }
    return tuple(_line(way, waited) for way in found)


def _line(way: OpChain, waited: set[int]) -> RankPositions:
    effects = way.effects
    keys, halves = _keys(effects)
    numbers: dict[object, int] = {}
    stands: list[Position] = []
    shape: list[tuple[Effect, ...]] = []
    needs: dict[Name, int] = {}
    low, passed = 0, 0

    def close(high: int) -> None:
        nonlocal low, passed
        torn = bool(keys[low][1])
        done = (low + high) // 2 if torn else high
        stands.append(Position(low, high, done, numbers.setdefault(keys[low], len(numbers)), None, dict(needs)))
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
            stands.append(Position(index, index, index, numbers.setdefault(half, len(numbers)), number, dict(needs)))
            shape.append(())
    close(len(effects))
    return RankPositions(way.name, way.by, tuple(way.done), tuple(stands), tuple(shape))


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


def alike(line: RankPositions, other: RankPositions, all_: tuple[RankPositions, ...]) -> bool:
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


Stands = tuple[int, ...]  # the index of the stand of each line
MOST = 50_000  # the most combinations of stands that are examined for one number of operations; of more, some are drawn
COMBINATIONS = 500_000  # likewise, for all numbers of operations together
WORK = 20_000_000  # to build one state, all operations are looked at: the most looks for all states together


def most_of(recording: Recording) -> int:
    """The most states of a recording that are built. A job that writes without a break could die in far more."""
    return max(500, WORK // max(1, len(recording.operations)))


@dataclass
class CrashPoint:
    """A class of moments that leave the same files, except that ranks may change places, and that a file may be written
    to another length."""

    stands: Stands
    seen: list[tuple[float, float]]  # (begin, end) in the recorded run, seconds of CLOCK_MONOTONIC
    at: int | None  # if the recorded run had such a moment: the number of operations before it


class CrashPoints:
    """All moments of a recording. `symmetry`: ranks that do the same operations count as equal."""

    def __init__(self, recording: Recording, symmetry: bool = True, seed: int = 0) -> None:
        self.recording, self.world = recording, FilesystemModel(recording)
        self.lines = rank_positions(recording, self.world)
        self._groups = _groups(self.lines) if symmetry else [[index] for index in range(len(self.lines))]
        self._index = {line.name: index for index, line in enumerate(self.lines)}
        self._of = {  # the line of each operation
            recording.lines[line.by][done - 1].number: index
            for index, line in enumerate(self.lines)
            for done in line.done[1:]
        }
        self._draw = random.Random(seed)
        self._needs = [[self._indices(stand) for stand in line.stands] for line in self.lines]
        self.moments = 0  # the number of moments between two operations, in every possible order of the ranks
        self.drawn = False  # there were too many moments to examine all
        self.classes = self._walk()

    def cut(self, stands: Stands) -> tuple[Cut, frozenset[int]]:
        """The number of operations that each rank has done, and the writes that were done only in part."""
        chosen = [line.stands[index] for line, index in zip(self.lines, stands, strict=True)]
        halves = frozenset(stand.half for stand in chosen if stand.half is not None)
        cut: dict[int | None, int] = {}
        for line, stand in zip(self.lines, chosen, strict=True):
            cut[line.by] = max(cut.get(line.by, 0), line.done[stand.done])
        return cut, halves

    def tree(self, moment: CrashPoint) -> Tree:
        return self.world.tree(*self.cut(moment.stands))

    def last(self, moment: CrashPoint) -> Operation | None:
        """The last operation before the death, in the recorded order. None if the death came before all of them."""
        cut, halves = self.cut(moment.stands)
        done = [op for op in self.recording.operations if self.world.has(cut, op) or op.number in halves]
        return max(done, key=lambda operation: operation.number, default=None)

    def seen(self) -> list[tuple[Stands, float, float]]:
        """The places of all ranks at each moment of the recorded run, in order of time, each with (begin, end)."""
        operations = self.recording.operations
        done, found = [0] * len(self.lines), []
        since = self.recording.began_s
        at = [0] * len(self.lines)
        for operation in operations:
            found.append((tuple(at), since, max(since, operation.ended_s)))
            since = max(since, operation.ended_s)
            index = self._of[operation.number]
            done[index] += 1
            at[index] = self._next(index, at[index], done[index])
        found.append((tuple(at), since, max(since, self.recording.ended_s)))
        return found

    def _next(self, index: int, at: int, done: int) -> int:
        stands = self.lines[index].stands
        while not (stands[at].low <= done <= stands[at].high and stands[at].half is None):
            at += 1
        return at

    def _walk(self) -> list[CrashPoint]:
        classes: dict[Stands, CrashPoint] = {}
        for number, (stands, since, until) in enumerate(self.seen()):
            moment = classes.setdefault(self._key(stands), CrashPoint(stands, [], number))
            if moment.seen and moment.seen[-1][1] >= since:
                moment.seen[-1] = (moment.seen[-1][0], until)
            else:
                moment.seen.append((since, until))
        for stands in self._all():
            self.moments += self._orbit(stands) * math.prod(
                line.stands[index].moments for line, index in zip(self.lines, stands, strict=True)
            )
            classes.setdefault(self._key(stands), CrashPoint(stands, [], None))
        found, most = list(classes.values()), most_of(self.recording)
        if len(found) > most:
            self.drawn = True
            seen = [moment for moment in found if moment.seen]
            found = self._draw.sample(seen, min(len(seen), most // 2)) + self._draw.sample(found, most // 2)
            found = list({id(moment): moment for moment in found}.values())
        return sorted(found, key=lambda moment: (sum(moment.stands), moment.stands))

    def _all(self) -> Iterator[Stands]:
        """All combinations of stands that can occur together. Of combinations that differ only by which rank is which,
        only one."""
        level = {(0,) * len(self.lines)}
        levels = sum(len(line.stands) for line in self.lines)
        most = min(MOST, max(20, COMBINATIONS // max(1, levels)))
        while level:
            yield from sorted(level)
            following = {self._sorted(after) for stands in level for after in self._after(stands)}
            if len(following) > most:
                self.drawn = True
                following = set(self._draw.sample(sorted(following), most))
            level = following

    def _after(self, stands: Stands) -> Iterator[Stands]:
        for index, at in enumerate(stands):
            if at + 1 < len(self.lines[index].stands):
                needs = self._needs[index][at + 1]
                if all(stands[other] >= least for other, least in needs):
                    yield (*stands[:index], at + 1, *stands[index + 1 :])

    def _indices(self, stand: Position) -> list[tuple[int, int]]:
        """The needs of a stand as (line, index of a stand), without its own line."""
        found = ((self._index[name], least) for name, least in stand.needs.items())
        return [(index, self.lines[index].first(least)) for index, least in found]

    def _sorted(self, stands: Stands) -> Stands:
        """The same with equal ranks in order: the rank that has got furthest comes first."""
        found = list(stands)
        for group in self._groups:
            if len(group) > 1:
                ordered = sorted((stands[index] for index in group), reverse=True)
                for index, at in zip(group, ordered, strict=True):
                    found[index] = at
        return tuple(found)

    def _key(self, stands: Stands) -> Stands:
        """A key that is equal for combinations that leave equal files."""
        return self._sorted(tuple(line.stands[index].files for line, index in zip(self.lines, stands, strict=True)))

    def _orbit(self, stands: Stands) -> int:
        """The number of combinations that differ from this one only by which rank is which."""
        found = 1
        for group in self._groups:
            counts = Counter(stands[index] for index in group)
            found *= math.factorial(len(group)) // math.prod(math.factorial(each) for each in counts.values())
        return found


def _groups(all_: tuple[RankPositions, ...]) -> list[list[int]]:
    """The indices of the lines, in groups of ranks that can change places."""
    groups: list[list[int]] = []
    for index, line in enumerate(all_):
        group = next((group for group in groups if alike(all_[group[0]], line, all_)), None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return groups
