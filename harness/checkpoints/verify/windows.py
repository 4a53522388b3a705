"""Collects everything that must be checked in a checkpoint (CRCs, digests of a manifest, NaN), and cuts the files into
windows, so that each byte is read only once.

A chunk of digests is never split. All else is cut where a window ends, because the CRCs of two parts can be joined, and
so can the parts of a number. Only chunks that overlap each other are read twice."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from typing import Generic, TypeVar

from xxhash import xxh3_64

from torchaos.harness.agent.manifest_writer import gaps

from ..files import Files
from ..layout import Checkpoint, Checksum, Problem, Trouble
from ..zip_records import crc32
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
    """The bytes of the places (start, stop) that are in no chunk, each once and in order."""
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
    """Small neighbours together: their begin, their end, and the chunks among them."""
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


# Checks the bytes of a file that are outside the spans of its manifest: headers, directories, padding. One digest
# covers all of them.

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
