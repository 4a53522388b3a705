"""Collects everything that must be checked in a checkpoint (CRCs, digests of a manifest, NaN), cuts the files into
windows, so that each byte is read only once, and reads and checks the windows in several threads.

A chunk that has a digest is never split; only chunks that overlap each other are read twice. Everything else is cut
where a window ends: the CRCs of two parts can be combined, and a number that was cut is put together again.

The bytes of a file that are outside the spans of its manifest (headers, directories, padding) have one digest together.

Each thread reads windows into its own buffer, and checks their contents while the processor's cache holds them. So the
memory is one buffer per thread, however large the checkpoint is. Hashes and numpy release the GIL, so the threads run
in parallel."""

from __future__ import annotations

import os
import posixpath
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from operator import attrgetter
from typing import Generic, TypeVar

import numpy as np
from xxhash import xxh3_64

from torchaos.harness.protocol.wire import gaps

from ..files import Buffer, Files
from ..layout import Checkpoint, Checksum, Problem, Trouble
from ..zip_records import combine, crc32
from .manifests import CHUNK, Digest, Saved, Span

WINDOW = 4 * CHUNK  # bytes; the caches of most processors hold as many, and threads rarely wait for each other
FLOATS = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2")
What = TypeVar("What")
_place = attrgetter("start", "stop")


@dataclass(slots=True)
class Run(Generic[What]):
    """The bytes of a file from `start` to `stop`. `what`: their CRC, their digest, or the type of their numbers."""

    start: int
    stop: int
    what: What


@dataclass(slots=True)
class Part(Generic[What]):
    """The bytes of a run that are in one window."""

    start: int
    stop: int
    run: Run[What]


@dataclass(slots=True)
class Window:
    """At most WINDOW bytes of a file, and what is checked in them."""

    path: str
    start: int
    stop: int
    chunks: Sequence[Run[Digest]]
    sums: Sequence[Part[Checksum]]
    numbers: Sequence[Part[str]]


def windows(found: Checkpoint, spans: Mapping[str, Sequence[Span]], checks: frozenset[str]) -> Iterator[Window]:
    """The windows of all files. `spans`: what a manifest says about each file. `checks`: crc, digest, nan."""
    sums = _sums(found.checksums if "crc" in checks else ())
    numbers = _numbers(found) if "nan" in checks else {}
    for file in found.files:
        chunks = _chunks(spans.get(file.path, ()) if "digest" in checks else ())
        yield from _of_file(file.path, chunks, sums.get(file.path, []), numbers.get(file.path, []))


def _of_file(
    path: str, chunks: list[Run[Digest]], sums: list[Run[Checksum]], numbers: list[Run[str]]
) -> Iterator[Window]:
    bare = _bare(sorted(map(_place, (*sums, *numbers))), chunks)
    of_sums, of_numbers, end = _Cutter(sums), _Cutter(numbers), 0
    for start, stop, inside in _grouped(merge(chunks, bare, key=_place)):
        first, end = max(start, end), max(stop, end)
        yield Window(path, start, stop, inside, of_sums.parts(first, end), of_numbers.parts(first, end))


def _bare(places: Iterable[tuple[int, int]], chunks: Sequence[Run[Digest]]) -> Iterator[Run[None]]:
    """The byte ranges that are in `places` (start, stop) and in no chunk. In order, and no byte twice."""
    at, near = 0, 0
    for start, stop in places:
        at = max(at, start)
        while at < stop:
            while near < len(chunks) and chunks[near].stop <= at:
                near += 1
            if near < len(chunks) and chunks[near].start <= at:
                at = chunks[near].stop
                continue
            end = min(at + CHUNK, stop, chunks[near].start if near < len(chunks) else stop)
            yield Run(at, end, None)
            at = end


def _grouped(runs: Iterable[Run[Digest] | Run[None]]) -> Iterator[tuple[int, int, list[Run[Digest]]]]:
    """Small neighbours together: the start and stop of each group, and the chunks in it."""
    start, stop, inside = 0, 0, list[Run[Digest]]()
    for run in runs:
        if stop and max(stop, run.stop) - start > WINDOW:
            yield start, stop, inside
            stop, inside = 0, []
        start, stop = (start, max(stop, run.stop)) if stop else (run.start, run.stop)
        if run.what is not None:
            inside.append(run)
    if stop:
        yield start, stop, inside


class _Cutter(Generic[What]):
    """Cuts runs into the parts that are in one window after the other."""

    def __init__(self, runs: list[Run[What]]) -> None:
        self._later, self._open = runs[::-1], list[Run[What]]()

    def parts(self, start: int, stop: int) -> list[Part[What]]:
        while self._later and self._later[-1].start < stop:
            self._open.append(self._later.pop())
        made = [Part(max(run.start, start), min(run.stop, stop), run) for run in self._open]
        self._open = [run for run in self._open if run.stop > stop]
        return made


def _chunks(spans: Iterable[Span]) -> list[Run[Digest]]:
    """One run for each digest, in order. Of two spans of the same bytes, the later one counts."""
    made = []
    for span in {(span.offset, span.length): span for span in spans}.values():
        end = span.offset + span.length
        for place, at in enumerate(range(span.offset, end, CHUNK)):
            made.append(Run(at, min(at + CHUNK, end), span.digests[place]))
    return sorted(made, key=_place)


def _sums(checksums: Iterable[Checksum]) -> dict[str, list[Run[Checksum]]]:
    """The bytes of each CRC by file, in order. Of two CRCs of the same bytes, the later one counts."""
    made = defaultdict(list)
    for extent, checksum in {checksum.extent: checksum for checksum in checksums}.items():
        if extent.length:
            made[extent.file].append(Run(extent.offset, extent.end, checksum))
    return {path: sorted(runs, key=_place) for path, runs in made.items()}


def _numbers(found: Checkpoint) -> dict[str, list[Run[str]]]:
    """The places of floating-point numbers by file, in order. A part that several tensors share is listed once."""
    by_type: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for tensor in found.tensors.values():
        if tensor.dtype in FLOATS:
            for extent in tensor.extents:
                if extent.length:
                    by_type[extent.file, tensor.dtype].append((extent.offset, extent.end))
    made: dict[str, list[Run[str]]] = defaultdict(list)
    for (path, dtype), places in by_type.items():
        begin, end = -1, -1
        for start, stop in sorted(places):
            if start >= end:
                if end > begin:
                    made[path].append(Run(begin, end, dtype))
                begin = start
            end = max(end, stop)
        made[path].append(Run(begin, end, dtype))
    return {path: sorted(runs, key=_place) for path, runs in made.items()}


_BLOCK = 1 << 20


def rest_differs(files: Files, path: str, saved: Saved) -> Problem | None:
    """A problem if these bytes differ from the saved bytes. None if they are equal, or if they have no digest."""
    if saved.rest is None:
        return None
    digester, crc = xxh3_64(), 0
    try:
        for begin, end in gaps(saved.size, [(span.offset, span.length) for span in saved.spans]):
            for at in range(begin, end, _BLOCK):
                part = files.read(path, at, min(_BLOCK, end - at))
                crc = crc32(part, crc)
                digester.update(part)
    except OSError as error:
        return Problem(Trouble.UNREADABLE, f"{posixpath.basename(path)}: {error.strerror or error}", path)
    now = f"{crc:08x}"
    if f"{digester.hexdigest()}{now}" == saved.rest or (len(saved.rest) == 8 and now == saved.rest):
        return None
    text = f"{posixpath.basename(path)}: its headers are not those that were written"
    return Problem(Trouble.DIGEST, text, path)


_MASKS = {
    "float16": (np.uint16, 0x7FFF, 0x7C00), "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float8_e4m3fn": (np.uint8, 0x7F, 0x7E), "float8_e5m2": (np.uint8, 0x7F, 0x7C),
}  # fmt: skip
WIDTHS = {
    "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float32": 4, "complex64": 4, "float64": 8, "complex128": 8,
}  # fmt: skip
_WIDE = {"float32": np.float32, "complex64": np.float32, "float64": np.float64, "complex128": np.float64}


@dataclass(frozen=True)
class BadChunk:
    """A chunk that differs from the manifest. In the file, it has the xxh3 `now` and the CRC `crc`; in the manifest,
    the xxh3 `digest` and the CRC `was`."""

    path: str
    offset: int
    length: int
    crc: int
    was: int | None
    digest: str | None
    now: str


@dataclass(frozen=True)
class Nans:
    """The number of NaN in a sequence of numbers, and the place of the first."""

    path: str
    offset: int
    dtype: str
    count: int


@dataclass
class Found:
    """The results of the checks of all windows."""

    chunks: list[BadChunk] = field(default_factory=list)
    nans: list[Nans] = field(default_factory=list)
    crcs: list[tuple[Checksum, int]] = field(default_factory=list)  # CRCs that differ, and the actual values
    errors: dict[str, str] = field(default_factory=dict)  # by file
    bytes: int = 0


class Stream:
    def __init__(self, files: Files, workers: int | None = None) -> None:
        self._files = files
        self._workers = workers or min(8, os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._crcs: dict[int, tuple[Run[Checksum], list[tuple[int, int, int]]]] = {}  # by run: start, length, crc
        self._halves: dict[tuple[str, int], list[tuple[int, bytes]]] = defaultdict(list)  # by number: start, bytes
        self._found = Found()
        self._failure: BaseException | None = None

    def run(self, windows: Iterator[Window]) -> Found:
        """Checks all windows. Must be called only once. Raises the errors of its threads."""
        threads = [threading.Thread(target=self._work, args=(windows,), daemon=True) for _ in range(self._workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure:
            raise self._failure
        self._join_crcs()
        found = self._found
        found.chunks.sort(key=lambda item: (item.path, item.offset))
        found.nans.sort(key=lambda item: (item.path, item.offset))
        return found

    def _work(self, windows: Iterator[Window]) -> None:
        buffer = Buffer(WINDOW)
        scratch = np.empty(WINDOW, np.uint8)
        try:
            with np.errstate(invalid="ignore"):
                while self._failure is None:
                    with self._lock:
                        window = next(windows, None)
                    if window is None:
                        return
                    view = buffer.part(window.start, window.stop - window.start, _first_number(window))
                    if self._read(window, view):
                        self._check(window, view, scratch)
        except BaseException as failure:
            self._failure = failure

    def _read(self, window: Window, into: memoryview) -> bool:
        error = "it is cut off"
        try:
            count = self._files.read_into(window.path, window.start, into)
        except OSError as raised:
            count, error = 0, raised.strerror or str(raised)
        with self._lock:
            self._found.bytes += count
            if count < len(into):
                self._found.errors.setdefault(window.path, error)
        return count == len(into)

    def _check(self, window: Window, data: memoryview, scratch: np.ndarray) -> None:
        crcs: dict[tuple[int, int], int] = {}  # so that no CRC is computed twice

        def crc_of(start: int, stop: int) -> int:
            if (start, stop) not in crcs:
                crcs[start, stop] = crc32(data[start - window.start : stop - window.start])
            return crcs[start, stop]

        for part in window.sums:
            crc = crc_of(part.start, part.stop)
            with self._lock:
                parts = self._crcs.setdefault(id(part.run), (part.run, []))[1]
                parts.append((part.start, part.stop - part.start, crc))
        for chunk in window.chunks:
            inside = data[chunk.start - window.start : chunk.stop - window.start]
            digest, was = chunk.what
            mine = _digest(inside) if digest else ""
            if mine != digest if digest else crc_of(chunk.start, chunk.stop) != was:
                crc, mine = crc_of(chunk.start, chunk.stop), mine or _digest(inside)
                with self._lock:
                    self._found.chunks.append(BadChunk(window.path, chunk.start, len(inside), crc, was, digest, mine))
        for numbers in window.numbers:
            self._look_at(
                window.path, numbers, data[numbers.start - window.start : numbers.stop - window.start], scratch
            )

    def _look_at(self, path: str, part: Part[str], data: memoryview, scratch: np.ndarray) -> None:
        """Looks for NaN in a part of a sequence of numbers. The ends of the part may split a number."""
        run, width = part.run, WIDTHS[part.run.what]
        head = min(-(part.start - run.start) % width, len(data))
        tail = (part.stop - run.start) % width if part.stop < run.stop and head < len(data) else 0
        if head:
            self._join_halves(path, part.start - (part.start - run.start) % width, part.start, data[:head], run.what)
        if tail:
            self._join_halves(path, part.stop - tail, part.stop - tail, data[len(data) - tail :], run.what)
        self._look_for_nans(path, part.start + head, data[head : len(data) - tail], run.what, scratch)

    def _join_halves(self, path: str, offset: int, start: int, part: memoryview, dtype: str) -> None:
        """Checks a number that the ends of windows split. The thread that reads its last part checks it."""
        with self._lock:
            parts = self._halves[path, offset]
            parts.append((start, bytes(part)))
            whole = b"".join(each for _, each in sorted(parts))
            if len(whole) < WIDTHS[dtype]:
                return
            del self._halves[path, offset]
        self._look_for_nans(path, offset, memoryview(whole), dtype, np.empty(16, np.uint8))

    def _look_for_nans(self, path: str, offset: int, data: memoryview, dtype: str, scratch: np.ndarray) -> None:
        nans = nans_in(data, dtype, scratch)
        if nans is not None:
            width = nans[1]
            with self._lock:
                self._found.nans.append(Nans(path, offset + int(nans[0][0]) * width, dtype, len(nans[0])))

    def _join_crcs(self) -> None:
        for run, parts in self._crcs.values():
            value = 0
            for _, length, crc in sorted(parts):
                value = combine(value, crc, length) if value else crc
            if value != run.what.crc:
                self._found.crcs.append((run.what, value))


def _first_number(window: Window) -> int:
    """Where most of the window's numbers begin. numpy copies numbers that are not aligned."""
    most = max(window.numbers, key=lambda part: part.stop - part.start, default=None)
    return most.run.start if most else 0


def _digest(data: memoryview) -> str:
    state = xxh3_64()
    state.update(data)  # releases the GIL in every version of xxhash, unlike the functions that need no state
    return str(state.hexdigest())


def nans_in(data: memoryview, dtype: str, scratch: np.ndarray) -> tuple[np.ndarray, int] | None:
    """The indices of NaN in some numbers, and the width of a number in bytes. None if there are none."""
    if dtype in _WIDE:
        kind = np.dtype(_WIDE[dtype])
        numbers = np.frombuffer(data, kind, len(data) // kind.itemsize)
        if not len(numbers) or not np.isnan(np.maximum.reduce(numbers)):  # a maximum with NaN is NaN
            return None
        return np.flatnonzero(np.isnan(numbers)), kind.itemsize
    word, mask_bits, most = _MASKS[dtype]
    kind = np.dtype(word)
    words = np.frombuffer(data, kind, len(data) // kind.itemsize)
    if not len(words):
        return None
    masked = np.bitwise_and(words, kind.type(mask_bits), out=scratch.view(kind)[: len(words)])
    return (np.flatnonzero(masked > most), kind.itemsize) if masked.max() > most else None
