"""Chooses the states to try: states with equal files once and, if there are too many, a choice that covers the likely
bugs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torchaos.harness.exploring.states.state import State

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
