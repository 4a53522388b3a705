"""Which states are tried: those of the wanted models of death, and of too many a choice that covers all operations."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torchaos.harness.exploring.operations import Recording
from torchaos.harness.exploring.states import power_loss, process_death
from torchaos.harness.exploring.states.persistence import Persistence
from torchaos.harness.exploring.states.state import State

# By the name that the command line takes.
MODELS: Mapping[str, Callable[[Recording], Iterator[State]]] = {
    "process-death": process_death.states,
    **{f"power-loss-{one.value}": partial(power_loss.states, persistence=one) for one in Persistence},
}


@dataclass(frozen=True)
class Choice:
    """The states to try, in order of their models and of the operations before the death."""

    states: tuple[State, ...]
    there_are: int

    @property
    def in_words(self) -> str:
        one = f"A death can leave {self.there_are} different contents of the checkpoint folder"
        if len(self.states) == self.there_are:
            return f"{one}; all are tried"
        return f"{one}; {len(self.states)} are tried, chosen so that each operation is the last one somewhere"


def chosen(recording: Recording, models: Sequence[str], most: int | None, seed: int) -> Choice:
    """At most `most` states. The seed reproduces the choice."""
    found = [state for model in models for state in _of_one_model(MODELS[model](recording))]
    kept = found if most is None or len(found) <= most else _covering(found, most, seed)
    return Choice(tuple(kept), len(found))


def _of_one_model(states: Iterator[State]) -> list[State]:
    """Equal files once: the state that has moments in the recorded run, since those are certain."""
    by_digest: dict[str, State] = {}
    for state in states:
        known = by_digest.get(state.digest)
        if known is None or (state.moments and not known.moments):
            by_digest[state.digest] = state
    return sorted(by_digest.values(), key=lambda state: (state.operations, state.name))


def _covering(states: Sequence[State], most: int, seed: int) -> list[State]:
    """One state for each operation that comes last, in turn and in random order, until there are enough."""
    draw = random.Random(seed)
    groups: dict[tuple[str, int], list[State]] = defaultdict(list)
    for state in states:
        groups[state.model, state.last_operation.number if state.last_operation else -1].append(state)
    lists = list(groups.values())
    draw.shuffle(lists)
    for one in lists:
        draw.shuffle(one)
    kept: set[int] = set()
    for turn in range(max(map(len, lists), default=0)):
        kept |= {id(one[turn]) for one in lists if turn < len(one) and len(kept) < most}
    ordered = [state for state in states if id(state) in kept]
    return ordered[:most]
