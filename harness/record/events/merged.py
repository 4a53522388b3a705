"""All events of a journal in order of time, and searches in them. Most of them are steps, which are kept as columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import merge
from itertools import islice
from typing import overload

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.steps.columns import Columns
from torchaos.harness.record.steps.executions import Executions
from torchaos.harness.record.steps.packed_blocks import Block, in_order

# All events of a journal in order of time. Most of them are steps, which are kept as columns.

OF_STEPS = frozenset({Kind.STEP, Kind.LOSS})


class Unmerged(Sequence[Event]):
    """Events in order of arrival, which are also there in order of time."""

    @property
    @abstractmethod
    def beside_steps(self) -> Sequence[Event]:
        """All events except those of steps and their losses."""

    @property
    @abstractmethod
    def merged(self) -> Merged: ...


class Merged(Sequence[Event]):
    """All events in order of time. Steps are kept in columns; each access to such a step makes an event."""

    def __init__(self, others: Iterable[Event], blocks: Sequence[Block]) -> None:
        """`others`: all events that are in no block, in order of time."""
        self.others, self.blocks = tuple(others), tuple(blocks)

    @classmethod
    def of(cls, events: Sequence[Event]) -> Merged:
        if isinstance(events, Unmerged):
            return events.merged
        return events if isinstance(events, Merged) else cls.of_parts(events, ())

    @classmethod
    def of_parts(cls, others: Iterable[Event], blocks: Sequence[Block]) -> Merged:
        """All events of these parts. `others`: the events that are in no block, in any order."""
        return cls(sorted(others, key=_when), blocks)

    @cached_property
    def beside_steps(self) -> tuple[Event, ...]:
        """All events except those of steps and their losses."""
        return tuple(event for event in self.others if event.kind not in OF_STEPS)

    @cached_property
    def steps(self) -> Columns:
        return Columns.of(self.others, self.blocks)

    @cached_property
    def steps_made(self) -> Executions:
        """All steps, in order of attempt and time, without global numbers."""
        return Executions.all_of(self.steps)

    def __len__(self) -> int:
        return len(self.others) + sum(map(len, self.blocks))

    def __iter__(self) -> Iterator[Event]:
        return merge(self.others, (block.event(row) for block, row in in_order(self.blocks)), key=_when)

    @overload
    def __getitem__(self, place: int) -> Event: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Event]: ...
    def __getitem__(self, place: int | slice) -> Event | Sequence[Event]:
        """The event at a place. The first and the last event are found quickly."""
        if isinstance(place, slice):
            return list(self)[place]
        if place in (0, -1) and len(self):
            ends = [block.event(int((block.own["mono_s"].argmin if place == 0 else block.own["mono_s"].argmax)()))
                    for block in self.blocks]  # fmt: skip
            ends += self.others[place : place + 1 or None]
            return min(ends, key=_when) if place == 0 else max(ends, key=_when)
        return list(self)[place] if place < 0 else next(islice(self, place, None))


def beside_steps(events: Sequence[Event]) -> Sequence[Event]:
    """All events except those of steps and their losses, in the same order. For a run in progress, this makes no event
    of a step."""
    if isinstance(events, (Unmerged, Merged)):
        return events.beside_steps
    return [event for event in events if event.kind not in OF_STEPS]


def _when(event: Event) -> tuple[float, str, int]:
    return event.mono_s, event.source, event.seq


# The events of one run, and searches in them.


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
