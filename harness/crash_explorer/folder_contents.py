"""The contents of a folder as data. Each file consists of pieces of bytes; equal pieces are stored once, and many trees
share them.

`pack` has the pieces one after the other, and `index` has a line for each piece with its digest, place and size."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import xxhash


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
        """The file after ftruncate(2) to `size` bytes, which may be more than before."""
        return Content(size, tuple(part for old in self.extents for part in _outside(old, size, max(size, old.end))))

    def zeroed(self, start: int, end: int) -> Content:
        """The file with zeros in the bytes from `start` to `end` - 1. Its size does not change."""
        return Content(self.size, tuple(part for old in self.extents for part in _outside(old, start, end)))

    def between(self, start: int, end: int) -> list[Extent]:
        """The pieces of the bytes from `start` to `end` - 1."""
        parts = []
        for extent in self.extents:
            low, high = max(start, extent.offset), min(end, extent.end)
            if low < high:
                parts.append(Extent(low, high - low, extent.blob, extent.start + low - extent.offset))
        return parts

    @cached_property
    def digest(self) -> str:
        """A digest. Equal for files that were made of the same pieces."""
        parts = (f"{extent.offset},{extent.size},{extent.blob},{extent.start}" for extent in self.extents)
        return hashlib.sha256(";".join([str(self.size), *parts]).encode()).hexdigest()


def _outside(extent: Extent, start: int, end: int) -> list[Extent]:
    """The parts of the extent before byte `start`, and from byte `end` on."""
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
        """A digest. Equal for trees whose files were made of the same pieces."""
        lines = [f"f {path!r} {content.digest}" for path, content in sorted(self.files.items())]
        lines += [f"d {path!r}" for path in sorted(self.folders)]
        lines += [f"l {path!r} {to!r}" for path, to in sorted(self.links.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def names(self) -> Mapping[str, frozenset[str]]:
        """Maps the path of each folder to the names in it. The path of the tree itself is the empty text."""
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
        """The number of bytes in the extents of all files; holes do not count."""
        return sum(extent.size for content in self.files.values() for extent in content.extents)


LARGE = 64 << 20  # bytes; larger files are hard links, if that is safe
_STEP = 1 << 20  # bytes


class Blobs:
    """The pieces (blobs) of one recording, in `folder`. One process may add pieces, and any number of processes may
    read them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._pack = os.open(folder / "pack", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._index = os.open(folder / "index", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        lines = os.pread(self._index, os.fstat(self._index).st_size, 0).split(b"\n")[:-1]
        read = (line.decode().split(" ") for line in lines)
        self._places = {digest: (int(at), int(size)) for digest, at, size in read}
        self._end = max((at + size for at, size in self._places.values()), default=0)

    def close(self) -> None:
        os.close(self._pack)
        os.close(self._index)

    def add(self, data: bytes) -> str:
        """Stores the bytes, and returns their digest. Raises OSError if they can't be written."""
        digest = xxhash.xxh3_128_hexdigest(data)
        if digest not in self._places:
            at, self._end = self._end, self._end + len(data)
            os.pwrite(self._pack, data, at)
            os.write(self._index, f"{digest} {at} {len(data)}\n".encode())
            self._places[digest] = (at, len(data))
        return digest

    def add_file(self, path: Path) -> tuple[str, int]:
        """Stores a whole file as one piece. Returns its digest and its size in bytes. Raises OSError if it can't be
        read or stored."""
        with open(path, "rb", buffering=0) as file:
            digest = xxhash.xxh3_128()
            while part := file.read(_STEP):
                digest.update(part)
            name, size = digest.hexdigest(), file.tell()
            if name not in self._places:
                at, self._end = self._end, self._end + size
                _copy(file.fileno(), 0, self._pack, at, size)
                os.write(self._index, f"{name} {at} {size}\n".encode())
                self._places[name] = (at, size)
        return name, size

    def size(self) -> int:
        """The number of stored bytes."""
        return self._end

    def read(self, content: Content, start: int = 0, size: int | None = None) -> bytes:
        """`size` bytes of a file from `start` on; None: up to the end. Raises KeyError if a piece is missing, OSError
        if it can't be read."""
        end = content.size if size is None else min(content.size, start + size)
        found = bytearray(max(0, end - start))
        for extent in content.extents:
            low, high = max(start, extent.offset), min(end, extent.end)
            if low < high:
                at = self._places[extent.blob][0] + extent.start + low - extent.offset
                found[low - start : high - start] = os.pread(self._pack, high - low, at)
        return bytes(found)

    def take(self, folder: Path) -> Tree:
        """Stores all files in `folder`, without the holes of sparse files. Raises OSError if a file can't be read or
        stored."""
        files, folders, links = {}, set(), {}
        for root, names, leaves in os.walk(folder):
            for path in (Path(root, name) for name in [*names, *leaves]):
                key = path.relative_to(folder).as_posix()
                if path.is_symlink():
                    links[key] = os.readlink(path)
                elif path.is_dir():
                    folders.add(key)
                elif path.is_file():
                    files[key] = self.take_file(path)
        return Tree(files, frozenset(folders), links)

    def take_file(self, path: Path) -> Content:
        """Stores a file. Raises OSError if it can't be read or stored."""
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            extents: list[Extent] = []
            for start, end in _pieces(file.fileno(), size):
                data = os.pread(file.fileno(), end - start, start)
                extents.append(Extent(start, len(data), self.add(data)))
        return Content(size, tuple(extents))

    def make_tree(self, tree: Tree, folder: Path, linked: Container[str] = ()) -> None:
        """Makes the files of the tree in `folder`, which must be empty or missing. Large files with a path in `linked`
        become hard links to a shared file, so nobody may change them in place. Raises KeyError if a piece is missing,
        OSError if a file can't be made."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(tree.folders):
            (folder / path).mkdir(parents=True, exist_ok=True)
        for path, content in tree.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if path in linked and sum(extent.size for extent in content.extents) > LARGE:
                os.link(self._made(content), folder / path)
            else:
                self.make_file(content, folder / path)
        for path, to in tree.links.items():
            (folder / path).symlink_to(to)

    def make_file(self, content: Content, path: Path) -> None:
        """Makes the file: by reflink if the file system has that, and always with holes. Raises KeyError if a piece is
        missing, OSError if the file can't be made."""
        with open(path, "xb", buffering=0) as file:
            os.ftruncate(file.fileno(), content.size)
            for extent in content.extents:
                at = self._places[extent.blob][0] + extent.start
                _copy(self._pack, at, file.fileno(), extent.offset, extent.size)

    def _made(self, content: Content) -> Path:
        """The shared file with this content, to which hard links are made. It is made again if somebody changed it."""
        path, note = self.folder / content.digest, self.folder / f"{content.digest}.is"
        if path.exists() and note.exists() and note.read_text() == _identity(path):
            return path
        fresh = self.folder / f"{content.digest}.{os.getpid()}"
        self.make_file(content, fresh)
        note.write_text(_identity(fresh))
        fresh.replace(path)
        return path


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _pieces(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and end of each piece of data, without holes."""
    at = 0
    while at < size:
        try:
            at = os.lseek(file, at, os.SEEK_DATA)
        except OSError:  # ENXIO: a hole to the end
            return
        end = os.lseek(file, at, os.SEEK_HOLE)
        while at < end:
            yield at, min(at + _STEP, end)
            at = min(at + _STEP, end)


def _copy(source: int, at: int, target: int, to: int, size: int) -> None:
    while size:
        try:
            done = os.copy_file_range(source, target, size, at, to)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            done = os.pwrite(target, os.pread(source, min(size, _STEP), at), to)
        if not done:
            raise OSError(errno.EIO, "the kept bytes are cut short")
        at, to, size = at + done, to + done, size - done
