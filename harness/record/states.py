"""The training state that the agent recorded, by name (see agent/kept.py): when each save began, and with which state
each attempt began and went on after a load or save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchaos.harness.agent.wire import Event, Kind

QUANTITIES = ("parameters", "frozen", "buffers", "moments")
Sums = Mapping[str, Sequence[str]]  # by name: type and shape, and the check sum on this rank


@dataclass(frozen=True)
class State:
    """What one rank recorded at one moment. `event.step`: the steps that it had completed in this attempt."""

    event: Event
    sums: Mapping[str, Sums]  # by quantity; one that is missing was not seen
    unsaved: frozenset[str]  # buffers that their module keeps out of its state_dict
    rng: Mapping[str, str]  # a digest of each random number generator
    inputs: Sums  # of the model, in this step; empty if they were not seen
    drawn: frozenset[str] | None  # generators that the forward drew from; None: not seen
    trained: frozenset[str]  # parameters that get gradients and belong to an optimizer of any class

    @property
    def begun(self) -> bool:
        """Whether a step began with this state. Otherwise a save did."""
        return self.event.kind is Kind.BEGUN


def states(events: Iterable[Event]) -> Iterator[State]:
    """Yields the recorded states, in order of the events. The events leave out values that have not changed."""
    told: dict[tuple[int | None, int | None], dict[str, Sums]] = {}
    for event in events:
        if event.kind not in (Kind.KEPT, Kind.BEGUN):
            continue
        before = told.setdefault((event.attempt, event.rank), {})
        same, data = event.data.get("same", ()), event.data
        before.update({what: data[what] for what in (*QUANTITIES, "unsaved", "trained") if what in data})
        there = {what: of for what, of in before.items() if what in data or what in same}
        drawn = data.get("drawn")
        yield State(
            event,
            {what: there[what] for what in QUANTITIES if what in there},
            frozenset(there.get("unsaved", ())),
            data.get("rng", {}),
            data.get("inputs", {}),
            None if drawn is None else frozenset(drawn),
            frozenset(there.get("trained", there.get("parameters", ()))),
        )
