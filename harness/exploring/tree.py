"""The contents of a folder as data. Each file consists of pieces of blobs, so that many trees share their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Extent:
    """`size` bytes of a file from `offset` on. They are the bytes of a blob from `start` on."""

    offset: int
    size: int
    blob: str  # the digest of the blob
    start: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class Content:
    """The content of a file of `size` bytes. The extents are in order and don't overlap; bytes outside them are
    zero."""

    size: int = 0
    extents: tuple[Extent, ...] = ()

    def written(self, new: Extent) -> Content:
        """The file after a write."""
        if not new.size:
            return self
        if new.offset >= (self.extents[-1].end if self.extents else 0):
            return Content(max(self.size, new.end), (*self.extents, new))
        kept = [part for old in self.extents for part in _outside(old, new.offset, new.end)]
        return Content(max(self.size, new.end), tuple(sorted([*kept, new], key=lambda extent: extent.offset)))

    def truncated(self, size: int) -> Content:
        """The file after ftruncate(2) to `size` bytes; it may grow."""
        return Content(size, tuple(part for old in self.extents for part in _outside(old, size, max(size, old.end))))

    def zeroed(self, start: int, end: int) -> Content:
        """The file with zeros from byte `start` to before byte `end`. Its size does not change."""
        return Content(self.size, tuple(part for old in self.extents for part in _outside(old, start, end)))

    def between(self, start: int, end: int) -> list[Extent]:
        """The pieces from byte `start` to before byte `end`."""
        parts = []
        for extent in self.extents:
            low, high = max(start, extent.offset), min(end, extent.end)
            if low < high:
                parts.append(Extent(low, high - low, extent.blob, extent.start + low - extent.offset))
        return parts

    @cached_property
    def digest(self) -> str:
        """A digest that is equal for files that were made of the same pieces."""
        parts = (f"{extent.offset},{extent.size},{extent.blob},{extent.start}" for extent in self.extents)
        return hashlib.sha256(";".join([str(self.size), *parts]).encode()).hexdigest()


def _outside(extent: Extent, start: int, end: int) -> list[Extent]:
    """The parts of the extent before byte `start` and from byte `end` on."""
    before = min(start, extent.end) - extent.offset
    skipped = max(end - extent.offset, 0)
    parts = []
    if before > 0:
        parts.append(Extent(extent.offset, before, extent.blob, extent.start))
    if skipped < extent.size:
        parts.append(Extent(extent.offset + skipped, extent.size - skipped, extent.blob, extent.start + skipped))
    return parts if end > extent.offset and start < extent.end else [extent]


@dataclass(frozen=True)
class Tree:
    """The contents of a folder. Paths are relative to it, with `/`. A file with two names counts as two files."""

    files: Mapping[str, Content] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()
    links: Mapping[str, str] = field(default_factory=dict)  # the targets of symbolic links, by path

    @cached_property
    def digest(self) -> str:
        """A digest that is equal for trees whose files were made of the same pieces."""
        lines = [f"f {path!r} {content.digest}" for path, content in sorted(self.files.items())]
        lines += [f"d {path!r}" for path in sorted(self.folders)]
        lines += [f"l {path!r} {to!r}" for path, to in sorted(self.links.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def names(self) -> Mapping[str, frozenset[str]]:
        """The names in each folder, by its path; the path of the tree itself is empty."""
        found: dict[str, set[str]] = {path: set() for path in ("", *self.folders)}
        for path in (*self.files, *self.folders, *self.links):
            while path:
                folder, _, name = path.rpartition("/")
                found.setdefault(folder, set()).add(name)
                path = folder
        return {path: frozenset(names) for path, names in found.items()}

    def below(self, folder: str) -> Tree:
        """The part of the tree in a folder, with the same paths."""
        start = f"{folder}/" if folder else ""
        return Tree(
            {path: content for path, content in self.files.items() if path.startswith(start)},
            frozenset(path for path in self.folders if path.startswith(start)),
            {path: to for path, to in self.links.items() if path.startswith(start)},
        )

    @property
    def bytes(self) -> int:
        """The number of bytes that were written, without the zeros of holes."""
        return sum(extent.size for content in self.files.values() for extent in content.extents)
