"""All events of a journal in order of time (those of a run in progress in order of arrival), and searches in them. Most
events are steps, which are kept as columns.

A long run has millions of steps, which are read again and again. So a usual step is kept as the place of its line in a
file, and becomes an event only when code asks for it."""

from __future__ import annotations

import os
import struct
import threading
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import overload

from torchaos.harness.protocol import packed_lines
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.steps.columns import Columns
from torchaos.harness.record.steps.executions import Executions
from torchaos.harness.record.steps.packed_blocks import Block, blocks_of, in_order

OF_STEPS = frozenset({Kind.STEP, Kind.LOSS})


class Unmerged(Sequence[Event]):
    """Events in order of arrival; `merged` has them in order of time."""

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


_AHEAD = 1 << 12  # bytes that are read at once
Line = tuple[Path, int, int]  # file, first byte, number of bytes


class Arrived:
    """The events so far. One thread may add events while others read."""

    def __init__(self) -> None:
        self._objects: list[Event] = []
        self._paths: list[Path] = []
        self._numbers: dict[Path, int] = {}
        # For each event: the number of its file, and where its line starts and how long it is. File -1: the event is an
        # object, and `_starts` has its place among these.
        self._starts, self._sizes, self._files = array("q"), array("i"), array("i")

    def __len__(self) -> int:
        return len(self._files)  # it is appended to last

    def add(self, event: Event) -> None:
        self._starts.append(len(self._objects))
        self._objects.append(event)
        self._sizes.append(0)
        self._files.append(-1)

    def add_line(self, path: Path, start: int, size: int) -> None:
        """Adds an event as the place of its line."""
        if (number := self._numbers.get(path)) is None:
            number = self._numbers[path] = len(self._paths)
            self._paths.append(path)
        self._starts.append(start)
        self._sizes.append(size)
        self._files.append(number)

    def places(self, first: int, end: int) -> Iterator[Event | Line]:
        """The events with numbers from `first` to `end` - 1: objects, or where their lines are."""
        for at in range(first, end):
            file, start = self._files[at], self._starts[at]
            yield self._objects[start] if file < 0 else (self._paths[file], start, self._sizes[at])

    def objects(self, end: int) -> list[Event]:
        """Of the first `end` events, those that are objects."""
        last = next((at for at in range(end - 1, -1, -1) if self._files[at] < 0), None)
        return [] if last is None else self._objects[: self._starts[last] + 1]


class Lines:
    """Reads lines of files. Lines that follow each other in a file are read together."""

    def __init__(self) -> None:
        self._texts: dict[Path, tuple[int, bytes]] = {}  # what was read of each file, and where it starts

    def at(self, path: Path, start: int, size: int) -> bytes:
        """The line at that place. Empty if the file is gone, or was cut off."""
        at, text = self._texts.get(path, (0, b""))
        if not at <= start <= at + len(text) - size:
            at, text = self._texts[path] = start, _read(path, start, max(size, _AHEAD))
        line = text[start - at : start - at + size]
        return line if len(line) == size else b""

    def event(self, path: Path, start: int, size: int) -> Event | None:
        """The event in the line at that place. None if the file is gone or was changed."""
        return event_of(self.at(path, start, size))


def event_of(line: bytes) -> Event | None:
    """The event in a line that could be read before. None if the file was changed since."""
    try:
        return Event.from_line(line)
    except ValueError:
        return None


def _read(path: Path, start: int, size: int) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(file, size, start)
    finally:
        os.close(file)


class Snapshot(Unmerged):
    """The events of a run so far, in order of arrival. `beside_steps` and `merged` cost little, however long the run
    is; each other access makes the events."""

    def __init__(self, arrived: Arrived, growing: Growing) -> None:
        self._arrived, self._growing, self._end = arrived, growing, len(arrived)

    def __len__(self) -> int:
        return self._end

    def __iter__(self) -> Iterator[Event]:
        return self._events(0, self._end)

    @overload
    def __getitem__(self, place: int) -> Event: ...
    @overload
    def __getitem__(self, place: slice) -> list[Event]: ...
    def __getitem__(self, place: int | slice) -> Event | list[Event]:
        if isinstance(place, slice):
            first, end, step = place.indices(self._end)
            return list(self._events(first, end)) if step == 1 else list(self)[place]
        first = place + self._end if place < 0 else place
        if not 0 <= first < self._end:
            raise IndexError(place)
        return next(self._events(first, first + 1))  # the file may be gone: StopIteration

    def _events(self, first: int, end: int) -> Iterator[Event]:
        """The events from number `first` to `end` - 1. Events whose files are gone or changed are left out;
        `Journal.failed` tells that there are such files."""
        lines = Lines()
        for place in self._arrived.places(first, end):
            if isinstance(place, Event):
                yield place
            elif (event := lines.event(*place)) is not None:
                yield event

    @cached_property
    def beside_steps(self) -> tuple[Event, ...]:
        """All events except those of steps and their losses, in order of arrival."""
        return tuple(event for event in self._arrived.objects(self._end) if event.kind not in OF_STEPS)

    @cached_property
    def merged(self) -> Merged:
        """These events in order of time. Events that arrived later may be among them."""
        return self._growing.merged()


_ENOUGH = 64  # usual steps of a process that are made into a block
_VALUES = frozenset(packed_lines.payload([], [], None, None, None, None, None, {}))


class Growing:
    """Turns the steps of a run in progress into blocks, each step once. Thread-safe."""

    def __init__(self, arrived: Arrived) -> None:
        self._arrived = arrived
        self._seen = 0
        self._others: list[Event] = []
        self._waiting: dict[str, list[tuple[Event, bytes]]] = {}  # usual steps that are objects, by source
        self._lines: dict[Path, list[Line]] = {}  # usual steps that are in a file
        self._blocks: dict[str, list[Block]] = {}  # by source
        self._lock = threading.Lock()

    def merged(self) -> Merged:
        """All events so far, in order of time."""
        with self._lock:
            first, self._seen = self._seen, len(self._arrived)
            for place in self._arrived.places(first, self._seen):
                if isinstance(place, Event):
                    self._take(place)
                else:
                    self._lines.setdefault(place[0], []).append(place)
            texts = Lines()
            for path, own in self._lines.items():
                if len(own) >= _ENOUGH:
                    self._store(path, own, [texts.at(*place) for place in own])
                    own.clear()
            waiting = [event for own in self._waiting.values() for event, _line in own]
            late = (texts.event(*place) for own in self._lines.values() for place in own)
            waiting += [event for event in late if event is not None]
            return Merged.of_parts([*self._others, *waiting], [block for own in self._blocks.values() for block in own])

    def _take(self, event: Event) -> None:
        line = _line(event)
        if line is None:
            self._others.append(event)
            return
        own = self._waiting.setdefault(event.source, [])
        own.append((event, line))
        if len(own) >= _ENOUGH:
            del self._waiting[event.source]
            made, left = blocks_of([line for _event, line in own])
            self._others += [own[place][0] for place in left]
            for block in made:
                self._put(block)

    def _store(self, path: Path, places: Sequence[Line], lines: Sequence[bytes]) -> None:
        """Turns lines of a file into blocks."""
        there = [number for number, line in enumerate(lines) if line]
        made, left = blocks_of([lines[number] for number in there], path, [places[number][1] for number in there])
        found = (event_of(lines[there[number]]) for number in left)
        self._others += [event for event in found if event is not None]
        for block in made:
            self._put(block)

    def _put(self, block: Block) -> None:
        """Adds a block. Blocks of equal size are joined to a larger block, so that there are few blocks, and no block
        is copied often."""
        blocks = self._blocks.setdefault(block.source, [])
        while blocks and len(blocks[-1]) <= len(block) and blocks[-1].is_like(block):
            block = blocks.pop().joined(block)
        blocks.append(block)


def _line(event: Event) -> bytes | None:
    """The packed line of the event. None if the event does not fit into a packed line."""
    if event.kind is not Kind.STEP or event.data.keys() != _VALUES or event.rank is None or event.attempt is None:
        return None
    data, who = dict(event.data), (event.source, event.rank, event.attempt)
    try:
        data["samples"] = None if data["samples"] is None else bytes.fromhex("".join(data["samples"]))
        line = packed_lines.Packer(*who).line(event.seq, event.wall_s, event.mono_s, event.step or 0, **data)
        return line if Event(Kind.STEP, **packed_lines.unpack(line)) == event else None
    except (struct.error, ValueError, TypeError, AttributeError):
        return None


def last_answer(events: Sequence[Event], key: str) -> bool | None:
    """The last answer of the probe named `key`: whether the condition of the probe holds. None if there is no answer
    yet."""
    seen = (
        event.data["holds"]
        for event in reversed(beside_steps(events))
        if event.kind is Kind.PROBED and event.data["probe"] == key
    )
    found: bool | None = next(seen, None)
    return found


def last_reason(events: Sequence[Event], name: str) -> str:
    """The reason in the last answer of a probe whose name begins with `name`, as a sentence. Empty if there is no
    answer."""
    for event in reversed(beside_steps(events)):
        if event.kind is Kind.PROBED and str(event.data["probe"]).startswith(name):
            return str(event.data.get("reason", ""))
    return ""
