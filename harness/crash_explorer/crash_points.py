"""The moments at which a whole job can die, in classes: the positions at which each rank can be in its operations, and
which positions of several ranks can occur together.

The operations of a recording are sorted into chains, whose order never changes. Each rank has a chain. If several ranks
use a file or folder, it is chance which of them makes it. So the operations by which a rank makes such shared things
are a chain of their own. This changes no order: such an operation still comes after what its rank did before, and
before what its rank did later. But the chains of the ranks that use the folder are then equal.

All moments between two changes of files count as one, and so do all moments in the middle of writing a file. So a chain
has only a few positions. A rank may be at a position only if other ranks have got far enough."""

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

Name = int | str | None  # a rank; None: processes of no rank; a string: the shared things that one rank makes
_MOVES = (OperationKind.RENAME, OperationKind.UNLINK, OperationKind.RMDIR)
Counts = Mapping[Name, int]  # how many operations of each chain are done


@dataclass
class OpChain:
    """A sequence of operations. `needs`: by the number of an operation, how many operations of each other chain come
    before it. Left out if the previous operation of this chain needs as many."""

    name: Name
    by: int | None  # the rank that did the operations
    effects: list[Effect] = field(default_factory=list)
    done: list[int] = field(default_factory=lambda: [0])  # by number of done operations of the chain: those of the rank
    needs: dict[int, Counts] = field(default_factory=dict)


def op_chains(recording: Recording, fs: FilesystemModel) -> tuple[OpChain, ...]:
    """The chains, those of ranks first. `needs` is complete: it includes what the needed operations need."""
    sources: dict[int, set[int]] = {effect.operation.number: set(effect.needs) for effect in fs.effects}
    for a, b in recording.before:
        if b in sources:
            sources[b].add(a)
    shared = _shared(fs)
    found: dict[Name, OpChain] = {rank: OpChain(rank, rank) for rank in recording.lines}
    pasts: dict[int, dict[Name, int]] = {}  # for each operation: what comes before its end
    last: dict[int | None, int] = {}  # the last operation of each rank
    for effect in fs.effects:
        number, rank = effect.operation.number, effect.operation.rank
        past: dict[Name, int] = {}
        for source in (*sources[number], *([last[rank]] if rank in last else ())):
            for name, count in pasts.get(source, {}).items():
                past[name] = max(past.get(name, 0), count)
        chain = found[rank]
        if number in shared:
            chain = found.setdefault(f"shared, by {rank}", OpChain(f"shared, by {rank}", rank))
        before = pasts[chain.effects[-1].operation.number] if chain.effects else {}
        needs = {name: count for name, count in past.items() if name != chain.name}
        if any(count > before.get(name, 0) for name, count in needs.items()):
            chain.needs[number] = needs
        chain.effects.append(effect)
        chain.done.append(fs.index[number] + 1)
        pasts[number], last[rank] = {**past, chain.name: len(chain.effects)}, number
    return tuple(found.values())


def _shared(fs: FilesystemModel) -> set[int]:
    """The operations that make a file or folder that another rank uses later. Renaming or removing it does not count as
    use."""
    makers = {
        effect.operation.number: effect.operation.rank
        for effect in fs.effects
        if effect.entries and effect.operation.kind in (OperationKind.MKDIR, OperationKind.CREATE)
    }
    return {
        need
        for effect in fs.effects
        if effect.operation.kind not in _MOVES
        for need in effect.needs
        if need in makers and makers[need] != effect.operation.rank
    }


_PAGE = 4096  # bytes; a longer write may be cut short by the death of its process
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Position:
    """A position in a chain: between `low` and `high` of its operations are done. All these moments count as one. The
    files are those after `done` operations."""

    low: int
    high: int
    done: int
    files: int  # equal if the rank's files are equal, but for the length of a file that is being written
    half: int | None  # the number of the write of which only a part was done
    needs: Counts  # how many operations of other chains must be done

    @property
    def moments(self) -> int:
        """The number of moments, each between two operations of the rank, at which the rank is at this position."""
        return 0 if self.half is not None else self.high - self.low + 1


@dataclass(frozen=True)
class RankPositions:
    """A chain, and its positions in order."""

    name: Name
    by: int | None  # the rank that does the operations
    done: tuple[int, ...]  # by number of done operations of this chain: all those of the rank
    positions: tuple[Position, ...]
    shape: tuple[tuple[Effect, ...], ...]  # the changes from each position to the next

    def first(self, least: int) -> int:
        """The index of the first position at which at least `least` operations are done."""
        return next(
            index for index, position in enumerate(self.positions) if position.low >= least and position.half is None
        )


def rank_positions(recording: Recording, fs: FilesystemModel) -> tuple[RankPositions, ...]:
    """The positions of each chain."""
    found = op_chains(recording, fs)
    by_name = {chain.name: chain for chain in found}
    waited = {
        by_name[name].effects[count - 1].operation.number
        for chain in found
        for needs in chain.needs.values()
        for name, count in needs.items()
    }
    return tuple(_positions(chain, waited) for chain in found)


def _positions(chain: OpChain, waited: set[int]) -> RankPositions:
    effects = chain.effects
    keys, halves = _keys(effects)
    numbers: dict[object, int] = {}
    positions: list[Position] = []
    shape: list[tuple[Effect, ...]] = []
    needs: dict[Name, int] = {}
    low, passed = 0, 0

    def close(high: int) -> None:
        nonlocal low, passed
        torn = bool(keys[low][1])
        done = (low + high) // 2 if torn else high
        positions.append(Position(low, high, done, numbers.setdefault(keys[low], len(numbers)), None, dict(needs)))
        shape.append(tuple(effect for effect in effects[passed:low] if effect.visible))
        low, passed = high + 1, low

    for index, effect in enumerate(effects):
        number = effect.operation.number
        half = halves.get(index)
        if keys[index] == keys[index + 1] and number not in waited and number not in chain.needs and half is None:
            continue
        close(index)
        needs |= chain.needs.get(number, {})
        if half is not None:
            positions.append(Position(index, index, index, numbers.setdefault(half, len(numbers)), number, dict(needs)))
            shape.append(())
    close(len(effects))
    return RankPositions(chain.name, chain.by, tuple(chain.done), tuple(positions), tuple(shape))


def _keys(effects: list[Effect]) -> tuple[list[tuple[object, ...]], dict[int, object]]:
    """For each number of done operations, a key that is equal only if the files are: changes of names so far, files
    written in full, and files in the middle of being written. Also, by index, the writes that may be torn although they
    write the whole file."""
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


def alike(chain: RankPositions, other: RankPositions, all_: tuple[RankPositions, ...]) -> bool:
    """Whether the two ranks are interchangeable: they do the same to their own files, and wait for the same
    operations."""
    mine, theirs = chain.name, other.name
    if not isinstance(mine, int) or not isinstance(theirs, int) or len(chain.positions) != len(other.positions):
        return False
    swap: dict[Name, Name] = {mine: theirs, theirs: mine}
    by_name = {chain.name: chain for chain in all_}

    def swapped(needs: Counts) -> dict[Name, int]:
        return {swap.get(name, name): by_name[name].first(least) for name, least in needs.items()}

    def plain(needs: Counts) -> dict[Name, int]:
        return {name: by_name[name].first(least) for name, least in needs.items()}

    for here, there, my_changes, their_changes in zip(
        chain.positions, other.positions, chain.shape, other.shape, strict=True
    ):
        if here.files != there.files or swapped(here.needs) != plain(there.needs):
            return False
        if not _same_changes(my_changes, mine, their_changes, theirs):
            return False
    rest = (chain for chain in all_ if chain.name not in swap)
    return all(swapped(position.needs) == plain(position.needs) for chain in rest for position in chain.positions)


def _same_changes(own: tuple[Effect, ...], rank: int, other: tuple[Effect, ...], its: int) -> bool:
    """Whether these changes are the same, except for sizes and for the number of the rank in names."""
    mine, theirs = _steps(own), _steps(other)
    return len(mine) == len(theirs) and all(
        a.kind is b.kind and _same_name(a.path, rank, b.path, its) and _same_name(a.to or "", rank, b.to or "", its)
        for a, b in zip(mine, theirs, strict=True)
    )


def _steps(changes: tuple[Effect, ...]) -> list[Operation]:
    """The operations, with several writes to one file as one, because the number of writes depends on the size."""
    steps: list[Operation] = []
    for effect in changes:
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


Combination = tuple[int, ...]  # the index of the position of each chain
MOST = 50_000  # combinations of positions for one number of operations; if there are more, some are drawn
COMBINATIONS = 500_000  # likewise, for all numbers of operations together
WORK = 20_000_000  # the most operations that are looked at to build all states; each state looks at all operations


def most_of(recording: Recording) -> int:
    """How many states of a recording are built at most. A job that writes all the time could have far more."""
    return max(500, WORK // max(1, len(recording.operations)))


@dataclass
class CrashPoint:
    """A class of moments that leave the same files. Interchangeable ranks may have changed places, and a file that is
    being written may have another length."""

    positions: Combination
    seen: list[tuple[float, float]]  # (begin, end) in the recorded run, seconds of CLOCK_MONOTONIC
    at: int | None  # the number of operations before the moment; None: the recorded run had no such moment


class CrashPoints:
    """All moments of a recording. `symmetry`: ranks that do the same operations count as equal."""

    def __init__(self, recording: Recording, symmetry: bool = True, seed: int = 0) -> None:
        self.recording, self.fs = recording, FilesystemModel(recording)
        self.chains = rank_positions(recording, self.fs)
        self._groups = _groups(self.chains) if symmetry else [[index] for index in range(len(self.chains))]
        self._index = {chain.name: index for index, chain in enumerate(self.chains)}
        self._of = {  # the chain of each operation
            recording.lines[chain.by][done - 1].number: index
            for index, chain in enumerate(self.chains)
            for done in chain.done[1:]
        }
        self._draw = random.Random(seed)
        self._needs = [[self._indices(position) for position in chain.positions] for chain in self.chains]
        self.moments = 0  # the number of moments between two operations, in every possible order of the ranks
        self.drawn = False  # there were too many moments to examine all
        self.classes = self._walk()

    def cut(self, positions: Combination) -> tuple[Cut, frozenset[int]]:
        """The number of operations that each rank has done, and the numbers of the writes that were only partly
        done."""
        chosen = [chain.positions[index] for chain, index in zip(self.chains, positions, strict=True)]
        halves = frozenset(position.half for position in chosen if position.half is not None)
        cut: dict[int | None, int] = {}
        for chain, position in zip(self.chains, chosen, strict=True):
            cut[chain.by] = max(cut.get(chain.by, 0), chain.done[position.done])
        return cut, halves

    def tree(self, moment: CrashPoint) -> Tree:
        return self.fs.tree(*self.cut(moment.positions))

    def done(self, moment: CrashPoint) -> list[Operation]:
        """The operations before the death, including writes that were done only in part. In the recorded order."""
        cut, halves = self.cut(moment.positions)
        return [op for op in self.recording.operations if self.fs.has(cut, op) or op.number in halves]

    def seen(self) -> list[tuple[Combination, float, float]]:
        """The positions of all chains at each moment of the recorded run, in order of time, each with (begin, end)."""
        operations = self.recording.operations
        done, found = [0] * len(self.chains), []
        since = self.recording.began_s
        at = [0] * len(self.chains)
        for operation in operations:
            found.append((tuple(at), since, max(since, operation.ended_s)))
            since = max(since, operation.ended_s)
            index = self._of[operation.number]
            done[index] += 1
            at[index] = self._next(index, at[index], done[index])
        found.append((tuple(at), since, max(since, self.recording.ended_s)))
        return found

    def _next(self, index: int, at: int, done: int) -> int:
        positions = self.chains[index].positions
        while not (positions[at].low <= done <= positions[at].high and positions[at].half is None):
            at += 1
        return at

    def _walk(self) -> list[CrashPoint]:
        classes: dict[Combination, CrashPoint] = {}
        for number, (positions, since, until) in enumerate(self.seen()):
            moment = classes.setdefault(self._key(positions), CrashPoint(positions, [], number))
            if moment.seen and moment.seen[-1][1] >= since:
                moment.seen[-1] = (moment.seen[-1][0], until)
            else:
                moment.seen.append((since, until))
        for positions in self._all():
            self.moments += self._orbit(positions) * math.prod(
                chain.positions[index].moments for chain, index in zip(self.chains, positions, strict=True)
            )
            classes.setdefault(self._key(positions), CrashPoint(positions, [], None))
        found, most = list(classes.values()), most_of(self.recording)
        if len(found) > most:
            self.drawn = True
            seen = [moment for moment in found if moment.seen]
            found = self._draw.sample(seen, min(len(seen), most // 2)) + self._draw.sample(found, most // 2)
            found = list({id(moment): moment for moment in found}.values())
        return sorted(found, key=lambda moment: (sum(moment.positions), moment.positions))

    def _all(self) -> Iterator[Combination]:
        """All combinations of positions that can occur together. Combinations that differ only in which of the
        interchangeable ranks is where count once."""
        level = {(0,) * len(self.chains)}
        levels = sum(len(chain.positions) for chain in self.chains)
        most = min(MOST, max(20, COMBINATIONS // max(1, levels)))
        while level:
            yield from sorted(level)
            following = {self._sorted(after) for positions in level for after in self._after(positions)}
            if len(following) > most:
                self.drawn = True
                following = set(self._draw.sample(sorted(following), most))
            level = following

    def _after(self, positions: Combination) -> Iterator[Combination]:
        for index, at in enumerate(positions):
            if at + 1 < len(self.chains[index].positions):
                needs = self._needs[index][at + 1]
                if all(positions[other] >= least for other, least in needs):
                    yield (*positions[:index], at + 1, *positions[index + 1 :])

    def _indices(self, position: Position) -> list[tuple[int, int]]:
        """The needs of a position as (chain, index of a position), without its own chain."""
        found = ((self._index[name], least) for name, least in position.needs.items())
        return [(index, self.chains[index].first(least)) for index, least in found]

    def _sorted(self, positions: Combination) -> Combination:
        """The same combination with interchangeable ranks in order, the furthest first."""
        found = list(positions)
        for group in self._groups:
            if len(group) > 1:
                ordered = sorted((positions[index] for index in group), reverse=True)
                for index, at in zip(group, ordered, strict=True):
                    found[index] = at
        return tuple(found)

    def _key(self, positions: Combination) -> Combination:
        """A key that is equal for combinations with equal files."""
        return self._sorted(
            tuple(chain.positions[index].files for chain, index in zip(self.chains, positions, strict=True))
        )

    def _orbit(self, positions: Combination) -> int:
        """The number of combinations that differ only in the order of interchangeable ranks."""
        found = 1
        for group in self._groups:
            counts = Counter(positions[index] for index in group)
            found *= math.factorial(len(group)) // math.prod(math.factorial(each) for each in counts.values())
        return found


def _groups(all_: tuple[RankPositions, ...]) -> list[list[int]]:
    """The indices of the chains, in groups of interchangeable ranks."""
    groups: list[list[int]] = []
    for index, chain in enumerate(all_):
        group = next((group for group in groups if alike(all_[group[0]], chain, all_)), None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return groups
