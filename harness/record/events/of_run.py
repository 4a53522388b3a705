"""The events of one run, and searches in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.events.merged import OF_STEPS, Merged
from torchaos.harness.record.steps import Executions


class RunEvents:
    """Events in order of time, searched by kind. Nearly all events of a long run are steps. A search for another kind
    skips them, and questions about steps are answered from columns."""

    events: Sequence[Event]

    @cached_property
    def beside_steps(self) -> tuple[Event, ...]:
        """All events except those of steps and their losses."""
        if isinstance(self.events, Merged):
            return self.events.beside_steps
        return tuple(event for event in self.events if event.kind not in OF_STEPS)

    @cached_property
    def sources_of_steps(self) -> dict[tuple[int, int], set[str]]:
        """Which sources reported steps, by attempt and rank."""
        return Merged.of(self.events).steps.sources_of_ranks()

    @cached_property
    def steps_made(self) -> Executions:
        """All steps that agents reported, also steps that the history leaves out, in order of attempt and time."""
        return Merged.of(self.events).steps_made

    def of_kind(self, *kinds: Kind) -> Iterator[Event]:
        searched = self.beside_steps if OF_STEPS.isdisjoint(kinds) else self.events
        return (event for event in searched if event.kind in kinds)

    def of_fault(self, fault: str, *kinds: Kind) -> Iterator[Event]:
        return (event for event in self.of_kind(*kinds) if event.data.get("fault") == fault)
