"""Which files of a folder were written, as the kernel reports it: inotify(7). Nobody has to look at each file."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import weakref
from pathlib import Path

_MODIFY, _MOVED_TO, _CREATE, _OVERFLOW = 0x2, 0x80, 0x100, 0x4000
_HEAD = struct.Struct("iIII")  # watch, mask, cookie, bytes of the name
_MOST = 1 << 16  # bytes that are read at once


class Changes:
    """The files of one folder. Writes from other machines, and through a mapping of the file, are not seen."""

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
        """Waits until a file was written, at most `timeout_s` seconds, and returns the names of all files that were
        written since the last call. None: any file may have been, because the kernel has lost count."""
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
        """Ends a `wait`, now or at its next call."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._close()
        self._close_wake()
