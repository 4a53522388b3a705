"""Reads windows in several threads, each into its own buffer, and checks their contents.

The memory is one buffer per thread, however large the checkpoint is. Hashes and numpy release the GIL, so the threads
run in parallel."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_64_hexdigest

from ..crc import combine, crc32
from ..files import Files
from ..layout import Checksum
from .manifests import CHUNK
from .regions import Piece, Region, Window

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
        self._crcs: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by region: start, length, crc
        self._regions: dict[int, Region] = {}
        self._found = Found()
        self._halves: dict[tuple[str, int], tuple[int, bytes]] = {}
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
        buffer = memoryview(bytearray(CHUNK))
        scratch = np.empty(CHUNK, np.uint8)
        try:
            while self._failure is None:
                with self._lock:
                    window = next(windows, None)
                if window is None:
                    return
                view = buffer[: window.stop - window.start]
                try:
                    count = self._files.read_into(window.path, window.start, view)
                except OSError as error:
                    with self._lock:
                        self._found.errors.setdefault(window.path, error.strerror or str(error))
                    continue
                with self._lock:
                    self._found.bytes += count
                    if count < len(view):
                        self._found.errors.setdefault(window.path, "it is cut off")
                        continue
                for piece in window.pieces:
                    self._check(
                        window.path, piece, view[piece.start - window.start : piece.stop - window.start], scratch
                    )
        except BaseException as failure:
            self._failure = failure

    def _check(self, path: str, piece: Piece, data: memoryview, scratch: np.ndarray) -> None:
        region = piece.region
        crc: int | None = None
        if region.checksum:
            crc = crc32(data)
            with self._lock:
                self._regions[id(region)] = region
                self._crcs[id(region)].append((piece.start, len(data), crc))
        if region.span:
            digest, was = region.span.digests[(piece.start - region.offset) // CHUNK]
            mine = xxh3_64_hexdigest(data) if digest else ""
            if mine != digest if digest else (crc if crc is not None else crc32(data)) != was:
                crc = crc if crc is not None else crc32(data)
                mine = mine or xxh3_64_hexdigest(data)
                with self._lock:
                    self._found.chunks.append(BadChunk(path, piece.start, len(data), crc, was, digest, mine))
        for begin, end, dtype in region.floats:
            first, last = max(begin, piece.start), min(end, piece.stop)
            if first < last:
                width = WIDTHS[dtype]
                head, tail = -(first - begin) % width, (last - begin) % width if last < end else 0
                if head + tail > last - first:
                    head, tail = last - first, 0
                if head:
                    self._join_halves(path, first + head - width, first, data[first - piece.start :][:head], dtype)
                if tail:
                    self._join_halves(path, last - tail, last - tail, data[last - tail - piece.start :][:tail], dtype)
                body = data[first + head - piece.start : last - tail - piece.start]
                self._look_for_nans(path, first + head, body, dtype, scratch)

    def _join_halves(self, path: str, offset: int, start: int, part: memoryview, dtype: str) -> None:
        """Checks an element that a window boundary splits. The thread that reads the second half checks it."""
        with self._lock:
            other = self._halves.pop((path, offset), None)
            if other is None:
                self._halves[path, offset] = start, bytes(part)
                return
        parts = sorted([other, (start, bytes(part))])
        self._look_for_nans(path, offset, memoryview(parts[0][1] + parts[1][1]), dtype, np.empty(16, np.uint8))

    def _look_for_nans(self, path: str, offset: int, data: memoryview, dtype: str, scratch: np.ndarray) -> None:
        nans = nans_in(data, dtype, scratch)
        if nans is not None:
            width = nans[1]
            with self._lock:
                self._found.nans.append(Nans(path, offset + int(nans[0][0]) * width, dtype, len(nans[0])))

    def _join_crcs(self) -> None:
        for key, parts in self._crcs.items():
            checksum = self._regions[key].checksum
            value = 0
            for _, length, crc in sorted(parts):
                value = combine(value, crc, length) if value else crc
            if checksum and value != checksum.crc:
                self._found.crcs.append((checksum, value))


def nans_in(data: memoryview, dtype: str, scratch: np.ndarray) -> tuple[np.ndarray, int] | None:
    """The indices of NaN in some numbers, and the width of a number in bytes. None if there are none."""
    if dtype in _WIDE:
        kind = np.dtype(_WIDE[dtype])
        numbers = np.frombuffer(data, kind, len(data) // kind.itemsize)
        mask = np.isnan(numbers, out=scratch[: len(numbers)].view(np.bool_))
        return (np.flatnonzero(mask), kind.itemsize) if mask.any() else None
    word, mask_bits, most = _MASKS[dtype]
    kind = np.dtype(word)
    words = np.frombuffer(data, kind, len(data) // kind.itemsize)
    if not len(words):
        return None
    masked = np.bitwise_and(words, kind.type(mask_bits), out=scratch.view(kind)[: len(words)])
    return (np.flatnonzero(masked > most), kind.itemsize) if masked.max() > most else None
