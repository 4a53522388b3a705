"""Which states are tried: those of the wanted models of death."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torchaos.harness.exploring.operations import Recording
from torchaos.harness.exploring.states import power_loss, process_death
from torchaos.harness.exploring.states.choose import choose
from torchaos.harness.exploring.states.persistence import Persistence
from torchaos.harness.exploring.states.state import State

# By the name that the command line takes.
MODELS: Mapping[str, Callable[[Recording], Iterator[State]]] = {
    "process-death": process_death.states,
    **{f"power-loss-{one.value}": partial(power_loss.states, persistence=one) for one in Persistence},
}


@dataclass(frozen=True)
class Choice:
    """The states to try: of states with equal files, one of each model, since a loss of power may lose a save that the
    death of processes at an earlier moment only comes before."""

    states: tuple[State, ...]
    there_are: int  # with different files
    in_words: str


def chosen(recording: Recording, models: Sequence[str], most: int | None, seed: int) -> Choice:
    """At most `most` different contents of the folder. The seed reproduces the choice."""
    found = choose((state for model in models for state in MODELS[model](recording)), most, seed)
    states = [state for group in found.equal for state in {each.model: each for each in reversed(group)}.values()]
    return Choice(tuple(states), found.there_are, found.in_words)
