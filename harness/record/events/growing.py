"""Keeps the events of a run in progress in a form that is cheap to read again and again."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from torchaos.harness.agent import packed
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.events.arrived import Arrived, Line, Lines, event_of
from torchaos.harness.record.events.merged import Merged
from torchaos.harness.record.steps.blocks import Block, blocks_of

_ENOUGH = 64  # usual steps of a process that are made into a block
_VALUES = frozenset(packed.payload([], [], None, None, None, None, None, {}))


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
        """Makes blocks of lines of a file."""
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
        line = packed.Packer(*who).line(event.seq, event.wall_s, event.mono_s, event.step or 0, **data)
        return line if Event(Kind.STEP, **packed.unpack(line)) == event else None
    except (struct.error, ValueError, TypeError, AttributeError):
        return None
