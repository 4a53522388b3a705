"""The moments at which a whole job can die, in classes: which places of the ranks can occur together. A *stand* is the
place of one rank in its operations (rank_positions.py)."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torchaos.harness.crash_explorer.folder_contents import Tree
from torchaos.harness.crash_explorer.operations import Operation, Recording
from torchaos.harness.crash_explorer.states.fs_model import Cut, World
from torchaos.harness.crash_explorer.states.rank_positions import Line, Stand, alike, lines

Stands = tuple[int, ...]  # the index of the stand of each line
MOST = 50_000  # the most combinations of stands that are examined for one number of operations; of more, some are drawn
COMBINATIONS = 500_000  # likewise, for all numbers of operations together
WORK = 20_000_000  # to build one state, all operations are looked at: the most looks for all states together


def most_of(recording: Recording) -> int:
    """The most states of a recording that are built. A job that writes without a break could die in far more."""
    return max(500, WORK // max(1, len(recording.operations)))


@dataclass
class Moment:
    """A class of moments that leave the same files, except that ranks may change places, and that a file may be written
    to another length."""

    stands: Stands
    seen: list[tuple[float, float]]  # (begin, end) in the recorded run, seconds of CLOCK_MONOTONIC
    at: int | None  # if the recorded run had such a moment: the number of operations before it


class Cuts:
    """All moments of a recording. `symmetry`: ranks that do the same operations count as equal."""

    def __init__(self, recording: Recording, symmetry: bool = True, seed: int = 0) -> None:
        self.recording, self.world = recording, World(recording)
        self.lines = lines(recording, self.world)
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

    def tree(self, moment: Moment) -> Tree:
        return self.world.tree(*self.cut(moment.stands))

    def last(self, moment: Moment) -> Operation | None:
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

    def _walk(self) -> list[Moment]:
        classes: dict[Stands, Moment] = {}
        for number, (stands, since, until) in enumerate(self.seen()):
            moment = classes.setdefault(self._key(stands), Moment(stands, [], number))
            if moment.seen and moment.seen[-1][1] >= since:
                moment.seen[-1] = (moment.seen[-1][0], until)
            else:
                moment.seen.append((since, until))
        for stands in self._all():
            self.moments += self._orbit(stands) * math.prod(
                line.stands[index].moments for line, index in zip(self.lines, stands, strict=True)
            )
            classes.setdefault(self._key(stands), Moment(stands, [], None))
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

    def _indices(self, stand: Stand) -> list[tuple[int, int]]:
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


def _groups(all_: tuple[Line, ...]) -> list[list[int]]:
    """The indices of the lines, in groups of ranks that can change places."""
    groups: list[list[int]] = []
    for index, line in enumerate(all_):
        group = next((group for group in groups if alike(all_[group[0]], line, all_)), None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return groups
