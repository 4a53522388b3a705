"""Read-only access to checkpoint files, on the local file system or on any file system that fsspec opens.

`Buffer` is memory for parts of files, at addresses to which the kernel copies fast. Linux copies a part of a file with
`rep movsb`. On AMD processors since Zen 3, this takes five times as long if the offset of the memory in its page is 1
to 31 bytes larger than the offset of the part in a page of the file. Large allocations of Python have such an offset if
the part begins with a page (xuanwo.io/2023/04-rust-std-fs-slower-than-python)."""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

from torchaos.harness.interfaces import UsageError

ALIGNED = 16  # bytes; a multiple of the width of every number
_APART = 256  # bytes between the two places, a multiple of ALIGNED and more than 31


class Buffer:
    """Memory for a part of a file, of at most `size` bytes. Each part replaces the part before."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = memoryview(mmap.mmap(-1, size + mmap.PAGESIZE + _APART + ALIGNED))  # begins with a page

    def part(self, offset: int, length: int, number: int = 0) -> memoryview:
        """Memory for `length` bytes from this offset of a file. A number that begins at the offset `number` of the file
        is aligned in it."""
        begin = offset % mmap.PAGESIZE + _APART + -number % ALIGNED
        return self._memory[begin : begin + length]


_AHEAD = 1 << 18  # bytes that a request to an object store fetches at least
_BLOCKS, _OPEN = 64, 128


class Files(Protocol):
    """A file system. Paths are absolute strings with slashes. All errors are OSErrors."""

    def names(self, folder: str) -> list[str]: ...

    def is_dir(self, path: str) -> bool: ...

    def exists(self, path: str) -> bool: ...

    def is_alias(self, path: str, root: str) -> bool:
        """Whether the path is a link to something below `root`."""

    def size(self, path: str) -> int: ...

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fills the buffer, and returns the number of bytes read: fewer than the buffer has only at the end of the
        file."""

    def close(self) -> None: ...


class Local:
    """The local file system. Keeps some files open, so that each read of a part of a file costs one system call.
    Thread-safe."""

    def __init__(self) -> None:
        self._fds: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def names(self, folder: str) -> list[str]:
        return sorted(os.listdir(folder))

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def is_alias(self, path: str, root: str) -> bool:
        return os.path.islink(path) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))

    def size(self, path: str) -> int:
        found = os.stat(path)
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise OSError(errno.ENODEV, "it is no file, but a pipe, a socket or a device", path)
        return found.st_size

    def read(self, path: str, offset: int, length: int) -> bytes:
        fd = self._fd(path)
        try:
            parts = []
            while length > 0 and (part := os.pread(fd, min(length, 1 << 30), offset)):
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(fd)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        fd, done = self._fd(path), 0
        try:
            while done < len(buffer) and (count := os.preadv(fd, [buffer[done:]], offset + done)):
                done += count
            return done
        finally:
            os.close(fd)

    def close(self) -> None:
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])

    def _fd(self, path: str) -> int:
        """A new file descriptor for the caller, because another thread may close the one that is kept."""
        with self._lock:
            fd = self._fds.pop(path, None)
            if fd is None:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # never blocks on a FIFO
            self._fds[path] = fd
            if len(self._fds) > _OPEN:
                os.close(self._fds.popitem(last=False)[1])
            return os.dup(fd)


class _Calls:
    """A file system of fsspec. Turns every error into an OSError, whatever error its library raises."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._fs, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except OSError:
                raise
            except Exception as error:
                raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error

        return call


class Remote:
    """An object store, through fsspec. Small reads are served from cached blocks, because each request takes long."""

    def __init__(self, fs: Any) -> None:
        self._fs = _Calls(fs)
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def names(self, folder: str) -> list[str]:
        listed = (str(path).rstrip("/") for path in self._fs.ls(folder, detail=False))
        return sorted(path.rpartition("/")[2] for path in listed if path.strip("/") != folder.strip("/"))

    def is_dir(self, path: str) -> bool:
        return bool(self._fs.isdir(path))

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(path))

    def is_alias(self, path: str, root: str) -> bool:
        return False

    def size(self, path: str) -> int:
        return int(self._fs.info(path)["size"])

    def read(self, path: str, offset: int, length: int) -> bytes:
        if length > _AHEAD:
            return self._fetch(path, offset, length)
        parts = []
        for number in range(offset // _AHEAD, (offset + max(length, 1) - 1) // _AHEAD + 1):
            start = max(offset - number * _AHEAD, 0)
            parts.append(self._block(path, number)[start : offset + length - number * _AHEAD])
        return b"".join(parts)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        data = self._fetch(path, offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._blocks.clear()

    def _block(self, path: str, number: int) -> bytes:
        key = (path, number)
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key]
        data = self._fetch(path, number * _AHEAD, _AHEAD)
        with self._lock:
            self._blocks[key] = data
            while len(self._blocks) > _BLOCKS:
                self._blocks.popitem(last=False)
        return data

    def _fetch(self, path: str, offset: int, length: int) -> bytes:
        end = min(offset + length, self.size(path))
        return bytes(self._fs.cat_file(path, start=offset, end=end)) if end > offset else b""


def locate(where: str) -> tuple[Files, str]:
    """The file system, and the path on it, of a path or an fsspec URL (s3://, gs://, file://). Raises UsageError if it
    can't be opened, for example without a library for this kind of address."""
    if "://" not in where:
        return Local(), os.path.abspath(where)
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        fs, path = url_to_fs(where)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{where}: it can't be opened: {error}; pip install 'torchaos[object-store]'") from error
    return (Local(), path) if getattr(fs, "protocol", None) in ("file", ("file", "local")) else (Remote(fs), path)


class Window(io.RawIOBase):
    """A part of a file, as a file object. A read of more than `most` bytes raises ValueError."""

    def __init__(self, files: Files, path: str, offset: int, length: int, most: int = 1 << 28) -> None:
        self._files, self._path, self._offset, self._length, self._most = files, path, offset, length, most
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._length)[whence]
        if at < 0:
            raise ValueError("a place before the start")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > self._most:
            raise ValueError(f"{wanted} bytes are too many for one read")
        data = self._files.read(self._path, self._offset + self._at, wanted)
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
