"""A content of the checkpoint folder that a death can leave. States with equal files are tried once and, if there are
too many, a choice that covers the likely bugs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchaos.harness.crash_explorer.folder_contents import Blobs, Tree
from torchaos.harness.crash_explorer.operations import Operation


@dataclass(frozen=True)
class State:
    """The contents of the folder that some deaths of the job leave, and these deaths."""

    name: str  # the same in each exploration of the same recording
    model: str  # of death: `process death`, `node death`, or `power loss` and its persistence model
    died_at_step: int | None  # the newest step that a rank was in at its last operation; None: unknown
    tree: Tree
    last_operation: Operation | None  # the last operation that changed the files, in the recorded order; None: none
    operations: int  # the number of operations before the death; a state with fewer is simpler
    blobs: Blobs = field(compare=False, repr=False)
    linked: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # see Blobs.make_tree
    moments: tuple[tuple[float, float], ...] = ()  # (begin, end) of deaths in the recorded run that leave this state,
    # seconds of CLOCK_MONOTONIC. Empty: only possible if the ranks' operations come in another order than recorded.
    lost: tuple[Operation, ...] = ()  # in a loss of power: operations whose changes are missing, wholly or in part
    done: Mapping[int | None, int] | None = None  # operations done by each rank; None: all up to the last
    damage: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)  # events of a fault that hit the files

    @property
    def digest(self) -> str:
        """A digest that is equal for states with equal files."""
        return self.tree.digest

    def write_to(self, folder: Path) -> None:
        """Makes the files in `folder`, which must be empty or missing. Raises OSError."""
        self.blobs.make_tree(self.tree, folder, self.linked)


def joined(times: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The times in order. Times that touch or overlap are joined."""
    found: list[tuple[float, float]] = []
    for since, until in sorted(times):
        if found and since <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], until))
        else:
            found.append((since, until))
    return tuple(found)


Feature = tuple[object, ...]


@dataclass(frozen=True)
class Chosen:
    """The states to try. `equal`: for each of them, all states with the same files, of any model, beginning with the
    state itself."""

    equal: tuple[tuple[State, ...], ...]
    there_are: int  # the number of states with different files

    @property
    def states(self) -> tuple[State, ...]:
        return tuple(group[0] for group in self.equal)

    @property
    def in_words(self) -> str:
        said = f"A death can leave {self.there_are} different contents of the checkpoint folder"
        if len(self.equal) == self.there_are:
            return f"{said}; all are tried"
        return (
            f"{said}; {len(self.equal)} are tried, chosen so that each operation is the last one, each change is lost, "
            "and each two change places"
        )


def choose(states: Iterable[State], most: int | None = None, seed: int = 0) -> Chosen:
    """At most `most` states with different files, the simplest first. States of moments that the recorded run had come
    before states that are only possible. The seed reproduces the choice."""
    groups: dict[str, list[State]] = {}
    for state in states:
        groups.setdefault(state.digest, []).append(state)
    for group in groups.values():
        group.sort(key=lambda state: (not state.moments, bool(state.lost), state.operations, state.model))
    found = sorted(groups.values(), key=lambda group: (group[0].operations, len(group[0].lost), group[0].name))
    kept = found if most is None or len(found) <= most else _covering(found, most, random.Random(seed))
    return Chosen(tuple(map(tuple, kept)), len(found))


def _covering(found: Sequence[list[State]], most: int, draw: random.Random) -> list[list[State]]:
    """The states in groups, each in random order: states that cover each operation as the last operation before the
    death, then each loss, then each pair of changes in the wrong order, then all others."""
    order = sorted(range(len(found)), key=lambda index: (not found[index][0].moments, draw.random()))
    features = {index: {each for state in found[index] for each in _features(state)} for index in order}
    kept: dict[int, None] = {}
    covered: set[Feature] = set()
    for kind in ("last", "lost", "before"):
        for index in order:
            if any(each[0] == kind for each in features[index] - covered):
                kept[index] = None
                covered |= features[index]
    return [found[index] for index in sorted([*kept, *(index for index in order if index not in kept)][:most])]


def _features(state: State) -> Iterator[Feature]:
    last = state.last_operation.number if state.last_operation else None
    yield "last", state.model, last
    for operation in state.lost:
        yield "lost", state.model, operation.number
        if len(state.lost) == 1:
            yield "before", state.model, operation.number, last
