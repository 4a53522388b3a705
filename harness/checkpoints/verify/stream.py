"""Reads windows in several threads, each into its own buffer, and checks their contents while the processor's cache
holds them.

The memory is one buffer per thread, however large the checkpoint is. Hashes and numpy release the GIL, so the threads
run in parallel."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_64

from ..files import Buffer, Files
from ..layout import Checksum
from ..zip_records import combine, crc32
from .windows import WINDOW, Part, Run, Window

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
    """What the checks of all windows found."""

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
        """Looks for NaN in a part of a sequence of numbers, whose ends may split a number."""
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
