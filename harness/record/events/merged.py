"""All events of a journal in order of time. Most of them are steps, which are kept as columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import merge
from itertools import islice
from typing import overload

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.steps.blocks import Block, in_order
from torchaos.harness.record.steps.columns import Columns
from torchaos.harness.record.steps.executions import Executions

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
