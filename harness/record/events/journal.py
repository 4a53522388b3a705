"""The journal: event files with one writer each, whose lines are checked and merged when they are read.

Ranks may die while they write, disks may be full, and run directories are copied, so every line may be damaged. A line
is damaged if a value has another type than in `wire.PAYLOADS`.

Each writer numbers its events 0, 1, 2, ..., so a missing number is a missing event. There is one exception: a thread
may take a number and be killed before it writes its line, while another thread of the process still writes a line. So a
single missing number near the end of the file of a killed process is no gap."""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from torchaos.harness.host.disk import Changes
from torchaos.harness.host.processes import give_back
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.packed_lines import is_packed
from torchaos.harness.protocol.wire import PAYLOADS, Event, EventFile, Kind
from torchaos.harness.record.events.merged import Arrived, Growing, Merged, Snapshot
from torchaos.harness.record.events.node_clocks import Clocks, OuterPids, nodes_of, with_unique_pids
from torchaos.harness.record.redaction import mask
from torchaos.harness.record.steps.packed_blocks import Block, blocks_of

# The names that `wire.PAYLOADS` uses.
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # no pid, step or count is larger
Sum = Annotated[str, Field(pattern=r"^([a-z]+[0-9.]*-)?[0-9a-f]{16}$")]
KindAndSum = Annotated[tuple[str, Sum], Field(strict=False)]  # strict: JSON has no tuples
_Part = Annotated[int, Field(ge=0, lt=2**64)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
Sums = Annotated[tuple[_Count, _Part, _Count, _Part], Field(strict=False)]

_TIME_END, _PLACES = 2**62, 2**63
_Time = Annotated[float, Field(ge=0, lt=_TIME_END, allow_inf_nan=False)]
_Place = Annotated[int, Field(ge=0, lt=_PLACES)] | None
_ENVELOPE: dict[str, Any] = {
    "source": str, "seq": Whole, "wall_s": _Time, "mono_s": _Time,
    "rank": NotRequired[_Place], "attempt": NotRequired[_Place], "step": NotRequired[_Place],
}  # fmt: skip


@cache
def _checker(kind: Kind) -> TypeAdapter[Any]:
    types = {key.rstrip("?"): NotRequired[of] if key.endswith("?") else of for key, of in PAYLOADS[kind].items()}
    return TypeAdapter(_strict({**_ENVELOPE, "data": _strict(types)}))


def _strict(types: Mapping[str, Any]) -> Any:
    shape = TypedDict("shape", types)  # type: ignore[misc]
    shape.__pydantic_config__ = ConfigDict(strict=True)  # type: ignore[attr-defined]
    return shape


def read(line: bytes | str) -> Event:
    """The event in a line. Raises ValueError if the line is torn or damaged, or if this version does not know its
    kind."""
    event = Event.from_line(line)
    if is_packed(line):
        _check_packed(event)
    else:
        _checker(event.kind).validate_python(event.__dict__)
    return event


def _check_packed(event: Event) -> None:
    """Checks the ranges of a packed step, much faster than the checker of other steps. The format gives the types."""
    rank, attempt, step = event.rank or 0, event.attempt or 0, event.step or 0
    if not (0 <= rank < _PLACES and 0 <= attempt < _PLACES and step >= 0):
        raise ValueError("a rank, attempt or step that no job has")
    if not (0 <= event.wall_s < _TIME_END and 0 <= event.mono_s < _TIME_END):
        raise ValueError("no time")


def of_later_version(line: bytes | str) -> tuple[str, int, str] | None:
    """Source, number and kind of a whole event, if this version does not know its kind. None for any other line."""
    try:
        raw = json.loads(line)
        source, number, kind = raw["source"], raw["seq"], raw["kind"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    known = not isinstance(kind, str) or kind in {known_kind.value for known_kind in Kind}
    whole = isinstance(source, str) and isinstance(number, int) and abs(number) < 2**63
    return (source, number, kind) if whole and not known else None


Numbers = npt.NDArray[np.int64]

_LAST = 3  # the most lines that may come after a number that was never written


class Gaps:
    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = defaultdict(list)
        self._columns: dict[str, list[Numbers]] = defaultdict(list)
        self._whole: set[str] = set()  # sources whose last event was seen

    def note(self, source: str, number: int, kind: str) -> None:
        self._numbers[source].append(number)
        if kind == Kind.AGENT_ENDED.value:
            self._whole.add(source)

    def note_all(self, source: str, numbers: Numbers) -> None:
        """Notes the numbers of many steps at once."""
        self._columns[source].append(numbers)

    def in_words(self) -> list[str]:
        found = ((source, *gap) for source in sorted(self._numbers.keys() | self._columns) for gap in self._of(source))
        return [
            f"event {first} of {source} is missing"
            if first == last
            else f"events {first} to {last} of {source} are missing"
            for source, first, last in found
        ]

    def _of(self, source: str) -> Iterator[tuple[int, int]]:
        numbers = np.unique(np.concatenate([np.array(self._numbers[source], np.int64), *self._columns[source]]))
        before = np.append(-1, numbers[:-1])
        for place in np.flatnonzero(numbers > before + 1).tolist():
            expected, number = int(before[place]) + 1, int(numbers[place])
            cut_short = number == expected + 1 and len(numbers) - place <= _LAST and source not in self._whole
            if not cut_short:
                yield expected, number - 1


_MANY = 1 << 18  # steps
_FREE_TEXT = frozenset(
    {"text", "line", "reason", "error"}
)  # free text of the job's or the machine's, that may hold a secret


def read_events(folder: Path, damaged: list[str] | None = None, gaps: Gaps | None = None) -> list[Event]:
    """All events of a run in order of time; see `read_journal`."""
    return list(read_journal(folder, damaged, gaps))


def read_journal(folder: Path, damaged: list[str] | None = None, gaps: Gaps | None = None) -> Merged:
    """All events of a run. Torn lines, and kinds of a later version, are skipped. Two arguments are filled: `damaged`
    with the file and number of each whole line that can't be read, `gaps` with each event's number."""
    damaged, gaps, pids = [] if damaged is None else damaged, gaps or Gaps(), OuterPids()
    events, blocks = list[Event](), list[Block]()
    for path in sorted(folder.glob("*.jsonl")):
        lines = _lines(path.read_bytes())
        usual, left = blocks_of(lines, path)
        for block in usual:
            gaps.note_all(block.source, block.whole("seq"))
        blocks += usual
        events += _read(path.name, ((place + 1, lines[place]) for place in left), damaged, gaps)
    if sum(map(len, blocks)) >= _MANY:
        give_back()
    clocks = Clocks(events)
    events = sorted(map(clocks.aligned, events), key=lambda event: (event.mono_s, event.source, event.seq))
    for event in events:
        pids.note(event)
    others = with_unique_pids([pids.outside(event) for event in events])
    return Merged(others, [clocks.aligned_block(block) for block in blocks])


def _lines(text: bytes) -> list[bytes]:
    """The lines, each with its end. Only a newline ends a line."""
    *whole, torn = text.split(b"\n")
    return [*(line + b"\n" for line in whole), *([torn] if torn else ())]


def _read(name: str, lines: Iterable[tuple[int, bytes]], damaged: list[str], gaps: Gaps) -> Iterator[Event]:
    """The events in lines of the file `name`, which are given with their numbers."""
    for number, line in lines:
        try:
            event = read(line)
        except (ValueError, RecursionError):
            if (later := of_later_version(line)) is not None:
                gaps.note(*later)
            elif line.endswith(b"\n") and line.strip():
                damaged.append(f"{name}:{number}")
            continue
        gaps.note(event.source, event.seq, event.kind.value)
        yield event


class Journal:
    """The journal of a run in progress. Writes the harness's own events, and follows the files of the ranks.
    Thread-safe."""

    POLL_S = 0.01  # what is written meanwhile is read together: ranks end a step at nearly the same time
    POLL_SHARED_S = 0.02  # for a folder that contains files of other nodes
    LOOK_S = 0.5  # seconds between looks at all files, because the kernel may report no change of some
    SHARE = 20  # looks at all files take at most this part of a core

    def __init__(
        self, folder: Path, source: str = "harness", follow: str = "*.jsonl", node: int | None = None
    ) -> None:  # fmt: skip
        """`source`: the name of this writer. `follow`: a pattern for the files to follow; given for the journal of a
        single node. `node`: if given, only new files of that node are followed. Otherwise, the events that are already
        in the folder are read at once, such as the events before the death if an exploration begins a resume."""
        self._folder, self._node = folder, node
        self._is_followed = re.compile(fnmatch.translate(follow)).match
        self._own = EventFile(folder / f"{source}.jsonl", source)
        self._offsets = {f"{source}.jsonl": -1}  # bytes read of each file; -1: the file is not followed
        if node is not None:
            self._offsets |= {name: -1 for name in os.listdir(folder) if self._is_followed(name)}
        self._arrived = Arrived()
        self._growing = Growing(self._arrived)
        self._pids = OuterPids()
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        self._closed, self._closed_file = threading.Event(), False
        self.failed = ""  # why the record is not complete; empty as long as it is
        self._listeners: list[Callable[[Event], None]] = []
        self._changes: Changes | None = None  # None: all files are looked at each time
        with suppress(OSError):  # the files of a node are written on that node, so its kernel reports them
            self._changes = Changes(folder)
        if node is None:
            self._poll(None)
        self._follower = threading.Thread(target=self._follow, name="journal", daemon=True)
        self._follower.start()

    def emit(
        self, kind: Kind, data: Mapping[str, Any], *, rank: int | None = None,
        attempt: int | None = None, mono_s: float | None = None,
    ) -> Event:  # fmt: skip
        """Writes an event, and returns it. If the file can't be written, sets `failed` instead of raising an error.
        Raises ChaosError if the journal is closed, because its file may then belong to another run."""
        with self._lock:
            if self._closed_file:
                raise ChaosError(f"{kind.value}: the run is over")
            clean = {
                key: mask(value) if key in _FREE_TEXT and isinstance(value, str) else value
                for key, value in data.items()
            }
            try:
                event = self._own.emit(kind, clean, rank=rank, attempt=attempt, mono_s=mono_s)
            except OSError as error:  # the undo goes on; the caller ends the run
                self.failed = self.failed or f"the journal can't be written: {error.strerror}"
                event = Event(kind, "harness", -1, time.time(), time.monotonic(), rank, attempt, None, clean)
            self._add(event)
        return event

    def snapshot(self) -> Snapshot:
        """The events so far, in order of arrival."""
        with self._lock:
            return Snapshot(self._arrived, self._growing)

    @property
    def count(self) -> int:
        """The number of events so far."""
        return len(self._arrived)

    def since(self, number: int) -> list[Event]:
        """The events from number `number` on (counted from 0), in order of arrival."""
        return self.snapshot()[number:]

    def take(self, events: list[Event]) -> None:
        """Adds events that another process has recorded. This journal shows them, but does not write them again."""
        with self._lock:
            for event in events:
                self._add(event)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Calls `listener` with each later event, in the thread that saw the event. The listener must be fast."""
        self._listeners.append(listener)

    def catch_up(self) -> None:
        """Reads all that was written to the files until now. Listeners must not call it."""
        self._poll(None)

    def close(self) -> None:
        """Reads the last events of the ranks, and stops following their files."""
        if not self._closed.is_set():
            self._closed.set()
            if self._changes:
                self._changes.wake()
            self._follower.join()
            if self._changes:
                self._changes.close()
            self._poll(None)
            with self._lock:
                self._closed_file = True
                self._own.close()

    def _follow(self) -> None:
        looked_s, took_s = time.monotonic(), 0.0
        wait_s = self.POLL_S if self._node is None else self.POLL_SHARED_S
        while not self._closed.is_set():
            names = self._changed(wait_s, took_s)
            if names is None or time.monotonic() > looked_s + max(self.LOOK_S, took_s * self.SHARE):
                began_s = time.thread_time()
                names, looked_s = self._grown(), time.monotonic()
                took_s = time.thread_time() - began_s
            self._poll(names)

    def _changed(self, wait_s: float, took_s: float) -> Collection[str] | None:
        """Waits until files were written, and returns their names; None: any file may have been written."""
        if not self._changes:
            self._closed.wait(max(wait_s, took_s * self.SHARE))
            return None
        if not (names := self._changes.wait(self.LOOK_S)):
            return names
        time.sleep(wait_s)
        later = self._changes.wait(0)
        return None if later is None else names | later

    def _grown(self) -> list[str]:
        """The names of all files whose length has changed since they were read, or that are gone."""
        gone = {name for name, offset in list(self._offsets.items()) if offset > 0}
        found = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if self._is_followed(entry.name):
                    gone.discard(entry.name)
                    with suppress(OSError):  # the file was removed
                        if entry.stat().st_size != self._offsets.get(entry.name, 0) >= 0:
                            found.append(entry.name)
        return [*found, *gone]

    def _poll(self, names: Collection[str] | None) -> None:
        """Reads what is new in these files. None: in all."""
        with self._reading:
            self._read_new(self._grown() if names is None else names)

    def _read_new(self, names: Collection[str]) -> None:
        for name in names:
            start = self._offsets.get(name, 0)
            if start < 0 or not self._is_followed(name):
                continue
            try:
                whole, newline, _torn = _read_from(f"{self._folder}/{name}", start).rpartition(b"\n")
            except OSError as error:  # the file was removed, or cut off
                self.failed = self.failed or f"the journal can't be read: {name}: {error.strerror}"
                self._offsets[name] = -1
                continue
            self._offsets[name] = start + len(whole) + len(newline)
            if newline:
                self._take_lines(name, start, whole.split(b"\n"))

    def _take_lines(self, name: str, start: int, lines: Sequence[bytes]) -> None:
        """Adds the events in these lines of a file. `start`: where they start."""
        at, found = start, list[tuple[Event, int, int]]()  # with start and length of a usual step's line
        for line in lines:
            with suppress(ValueError, RecursionError):
                found.append((read(line), at, len(line) + 1 if is_packed(line) else 0))
            at += len(line) + 1
        if start == 0 and found and self._node not in (None, nodes_of([found[0][0]]).get(found[0][0].source)):
            self._offsets[name] = -1  # the first event shows which node wrote the file
            return
        path = self._folder / name
        with self._lock:
            for event, at, size in found:
                if size:
                    self._arrived.add_line(path, at, size)
                    self._tell(event)
                else:
                    self._add(event)

    def _add(self, event: Event) -> None:
        self._pids.note(event)
        event = self._pids.outside(event)
        self._arrived.add(event)
        self._tell(event)

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


def _read_from(path: str, start: int) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if size < start:
            raise OSError(errno.EIO, "it became shorter")
        return os.pread(file, size - start, start)
    finally:
        os.close(file)
