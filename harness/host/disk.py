"""Files on this machine's disks: functions that return when a change is on disk, and the time at which a file was made.
`Changes` reports which files of a folder were written, as the kernel sees it (inotify(7))."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import weakref
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Returns when the entries of the folder are on disk, that is, the names of the files that were made, renamed or
    removed in it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def owner_only(path: str, flags: int) -> int:
    """An `opener` for open(): only the owner can read a new file, and a symbolic link is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def write_atomically(path: Path, text: str, private: bool = False) -> None:
    """Replaces the file in one step, so that a reader sees the old or the new text and never a part of it. `private`:
    only the owner may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "w", encoding="utf-8", opener=owner_only if private else None) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def born_ns(path: Path) -> int:
    """When the file was made, in nanoseconds since the epoch, by statx(2). 0 if not known. This is needed to identify a
    file, because file systems give the inode number of a removed file to a new file."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    buffer = ctypes.create_string_buffer(256)
    at_fdcwd, symlink_nofollow, btime = -100, 0x100, 0x800
    if statx is None or statx(at_fdcwd, os.fsencode(path), symlink_nofollow, btime, buffer) != 0:
        return 0
    (mask,) = struct.unpack_from("<I", buffer, 0)
    seconds, nanoseconds = struct.unpack_from("<qI", buffer, 80)
    return int(seconds * 10**9 + nanoseconds) if mask & btime else 0


_MODIFY, _MOVED_TO, _CREATE, _OVERFLOW = 0x2, 0x80, 0x100, 0x4000
_HEAD = struct.Struct("iIII")  # watch, mask, cookie, bytes of the name
_MOST = 1 << 16  # bytes that are read at once


class Changes:
    """Watches the files of one folder for writes. Writes from other machines, and through a memory mapping of a file,
    are not seen."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError if the kernel refuses, because this user has too many watches or the folder is missing."""
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._close = weakref.finalize(self, os.close, fd)
        if libc.inotify_add_watch(fd, os.fsencode(folder), _MODIFY | _MOVED_TO | _CREATE) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")
        self._fd, self._wake = fd, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_wake = weakref.finalize(self, os.close, self._wake)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def wait(self, timeout_s: float) -> set[str] | None:
        """Waits until a file was written, at most `timeout_s` seconds. Returns the names of all files that were written
        since the last call. None if the kernel has lost some events, so that any file may have been written."""
        self._poll.poll(timeout_s * 1000)
        names = set[str]()
        while True:
            try:
                found = os.read(self._fd, _MOST)
            except BlockingIOError:
                return names
            at = 0
            while at < len(found):
                _watch, mask, _cookie, size = _HEAD.unpack_from(found, at)
                if mask & _OVERFLOW:
                    return None
                at += _HEAD.size + size
                names.add(os.fsdecode(found[at - size : at].rstrip(b"\0")))

    def wake(self) -> None:
        """Makes a `wait` end: the present one, or otherwise the next one."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._close()
        self._close_wake()
