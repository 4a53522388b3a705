"""Collects everything that must be checked in one file (CRCs, digests of a manifest, NaN), and cuts it into windows, so
that each byte is read only once.

A region is a sequence of bytes with one CRC or one span of digests, or a sequence of floating-point numbers. A region
is cut into windows from its own start, so that no chunk of digests is split."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..layout import Checkpoint, Checksum
from .manifests import CHUNK, Span

FLOATS = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2")


@dataclass
class Region:
    offset: int
    length: int
    checksum: Checksum | None = None
    span: Span | None = None
    floats: list[tuple[int, int, str]] = field(default_factory=list)  # begin and end in the file, type

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Piece:
    """A part of a region, in one window."""

    region: Region
    start: int  # in the file
    stop: int


@dataclass(frozen=True)
class Window:
    """At most CHUNK bytes of a file, with the parts of regions in them."""

    path: str
    start: int
    stop: int
    pieces: tuple[Piece, ...]


def regions_of(found: Checkpoint, path: str, spans: Sequence[Span], checks: frozenset[str]) -> list[Region]:
    """All regions of one file, in the order of their offsets. `checks`: crc, digest, nan."""
    made: dict[tuple[int, int], Region] = {}
    for checksum in found.checksums if "crc" in checks else ():
        where = checksum.extent
        if where.file == path:
            made.setdefault((where.offset, where.length), Region(where.offset, where.length)).checksum = checksum
    for span in spans if "digest" in checks else ():
        made.setdefault((span.offset, span.length), Region(span.offset, span.length)).span = span
    regions = sorted(made.values(), key=lambda region: (region.offset, -region.length))
    if "nan" in checks:
        regions = _with_floats(regions, _floats(found, path))
    return regions


def windows(path: str, regions: Sequence[Region]) -> Iterator[Window]:
    """Cuts the regions of a file into windows. Small neighbours share a window."""
    pieces: list[Piece] = []
    for region in regions:
        for start in range(region.offset, region.end, CHUNK):
            piece = Piece(region, start, min(start + CHUNK, region.end))
            if pieces and (piece.stop - pieces[0].start > CHUNK or piece.start < pieces[-1].start):
                yield _window(path, pieces)
                pieces = []
            pieces.append(piece)
    if pieces:
        yield _window(path, pieces)


def _window(path: str, pieces: list[Piece]) -> Window:
    return Window(path, pieces[0].start, max(piece.stop for piece in pieces), tuple(pieces))


def _floats(found: Checkpoint, path: str) -> list[tuple[int, int, str]]:
    """The places of floating-point numbers: begin, end, type. A part that several tensors share is listed once."""
    by_type: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tensor in found.tensors.values():
        if tensor.dtype in FLOATS:
            for extent in tensor.extents:
                if extent.file == path and extent.length:
                    by_type[tensor.dtype].append((extent.offset, extent.end))
    merged = []
    for dtype, runs in by_type.items():
        at, end = 0, -1
        for begin, stop in sorted(runs):
            if begin >= end:
                if end > at:
                    merged.append((at, end, dtype))
                at, end = begin, stop
            end = max(end, stop)
        merged.append((at, end, dtype))
    return sorted(merged)


def _with_floats(regions: list[Region], floats: list[tuple[int, int, str]]) -> list[Region]:
    """Adds the numbers to the region that contains them. If there is none, makes a region for them."""
    alone = []
    place = 0
    for begin, end, dtype in floats:
        while place < len(regions) and regions[place].end <= begin:
            place += 1
        near = regions[place : place + 2]
        inside = next((region for region in near if region.offset <= begin and end <= region.end), None)
        if inside:
            inside.floats.append((begin, end, dtype))
        else:
            alone.append(Region(begin, end - begin, floats=[(begin, end, dtype)]))
    return sorted([*regions, *alone], key=lambda region: (region.offset, -region.length))
