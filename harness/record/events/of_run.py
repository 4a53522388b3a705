"""The events of one run, and searches in them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from torchaos.harness.agent.wire import Event, Kind

_OF_STEPS = frozenset({Kind.STEP, Kind.LOSS})


class RunEvents:
    """Events in order of time, searched by kind. Nearly all events of a long run are steps. A search for another kind
    does not look at these."""

    events: tuple[Event, ...]

    @cached_property
    def beside_steps(self) -> tuple[Event, ...]:
        """All events except those of steps and their losses."""
        return tuple(event for event in self.events if event.kind not in _OF_STEPS)

    def of_kind(self, *kinds: Kind) -> Iterator[Event]:
        searched = self.beside_steps if _OF_STEPS.isdisjoint(kinds) else self.events
        return (event for event in searched if event.kind in kinds)

    def of_fault(self, fault: str, *kinds: Kind) -> Iterator[Event]:
        return (event for event in self.of_kind(*kinds) if event.data.get("fault") == fault)
