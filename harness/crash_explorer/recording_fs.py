"""Serves the checkpoint folder over itself by FUSE, and records what each process does to it:

    python -m torchaos.harness.crash_explorer.recording_fs FOLDER SOURCE SWITCH HOME

HOME gets the recording (recording_log.py); an operation is noted when it ends. The server is the server of the storage
faults, without a fault. It sees every write of every library and language. It sees writes to a mapped file (mmap) only
when the kernel writes them back, which is later than the job made them."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mfusepy

from torchaos.harness.crash_explorer.operations import OperationKind
from torchaos.harness.crash_explorer.recording_log import RecordingLog, is_given
from torchaos.harness.fault_drivers.fs_rules import Rules
from torchaos.harness.fault_drivers.storage_fs import Served, Spoiler, serve
from torchaos.harness.rollback.file_handles import Mount

_HIDDEN = ".fuse_hidden"  # libfuse renames a file to such a name if it is removed while it is open


class RecordingFs(Served):
    """Serves the folder and records the operations. A change and its line are written together, so the order of lines
    is the order of changes. Only a sync may take time; its line says which changes it covers."""

    def __init__(self, folder: str, spoil: Spoiler, mount: Mount, home: Path) -> None:
        super().__init__(folder, spoil, mount)
        self._notes = RecordingLog(home)
        self._lock = threading.Lock()
        self._files = itertools.count(1)
        self._by_inode: dict[int, int] = {}
        self._by_handle: dict[int, tuple[int, int]] = {}  # by handle for writing: file, thread that opened it

    def open(self, path: str, flags: int) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC)
        if not writes:
            return super().open(path, flags)
        with self._lock:
            began = time.monotonic()
            handle = super().open(path, flags)
            self._opened(handle, new=False)
            self._note(OperationKind.OPEN, path, began, handle)
            if flags & os.O_TRUNC:
                self._note(OperationKind.TRUNCATE, path, began, handle, size=0)
            return handle

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        with self._lock:
            began = time.monotonic()
            there = self._inode(path) is not None
            handle = super().create(path, mode, fi)
            self._opened(handle, new=not there)
            self._note(OperationKind.OPEN if there else OperationKind.CREATE, path, began, handle)
            if there:
                self._note(OperationKind.TRUNCATE, path, began, handle, size=0)
            return handle

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        with self._lock:
            began = time.monotonic()
            done = super().write(path, data, offset, fh)
            blob = self._notes.blobs.add(data[:done])
            self._note(OperationKind.WRITE, path, began, fh, offset=offset, size=done, blob=blob)
            return done

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        with self._lock:
            began = time.monotonic()
            inode = None if fh else self._inode(path)
            done = super().truncate(path, length, fh)
            self._note(OperationKind.TRUNCATE, path, began, fh, file=self._by_inode.get(inode or 0), size=length)
            return done

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        covers, began = self._notes.next, time.monotonic()
        done = super().fsync(path, datasync, fh)
        with self._lock:
            self._note(OperationKind.FDATASYNC if datasync else OperationKind.FSYNC, path, began, fh, covers=covers)
        return done

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        covers, began = self._notes.next, time.monotonic()
        done = super().fsyncdir(path, datasync, fh)
        with self._lock:
            self._note(OperationKind.FSYNC_FOLDER, path, began, covers=covers)
        return done

    def flush(self, path: str, fh: int) -> int:
        """Records the close of a file. FUSE calls it at each close(2), also of a copy of the file handle."""
        with self._lock:
            if fh in self._by_handle:
                self._note(OperationKind.CLOSE, path, time.monotonic(), fh)
        return super().flush(path, fh)

    def release(self, path: str, fh: int) -> int:
        with self._lock:
            self._by_handle.pop(fh, None)
        return super().release(path, fh)

    def mkdir(self, path: str, mode: int) -> int:
        return self._change(OperationKind.MKDIR, path, None, lambda: super(RecordingFs, self).mkdir(path, mode))

    def rmdir(self, path: str) -> int:
        return self._change(OperationKind.RMDIR, path, None, lambda: super(RecordingFs, self).rmdir(path))

    def unlink(self, path: str) -> int:
        hidden = _name(path).startswith(_HIDDEN)  # recorded when it got that name
        return self._change(
            None if hidden else OperationKind.UNLINK, path, None, lambda: super(RecordingFs, self).unlink(path)
        )

    def rename(self, old: str, new: str) -> int:
        hides = _name(new).startswith(_HIDDEN)
        kind = OperationKind.UNLINK if hides else OperationKind.RENAME
        return self._change(kind, old, None if hides else new, lambda: super(RecordingFs, self).rename(old, new))

    def link(self, target: str, source: str) -> int:
        return self._change(OperationKind.LINK, source, target, lambda: super(RecordingFs, self).link(target, source))

    def symlink(self, target: str, source: str) -> int:
        return self._change(
            OperationKind.SYMLINK, target, source, lambda: super(RecordingFs, self).symlink(target, source)
        )

    def _change(self, kind: OperationKind | None, path: str, to: str | None, work: Callable[[], int]) -> int:
        with self._lock:
            began = time.monotonic()
            done = work()
            if kind is not None:
                self._note(kind, path, began, to=to if kind is OperationKind.SYMLINK or to is None else _name_of(to))
            return done

    def _opened(self, handle: int, new: bool) -> None:
        inode = os.fstat(handle).st_ino
        if new or inode not in self._by_inode:  # an inode may be used again for a new file
            self._by_inode[inode] = next(self._files)
        self._by_handle[handle] = (self._by_inode[inode], mfusepy.fuse_get_context()[2])

    def _inode(self, path: str) -> int | None:
        try:
            return os.stat(_name_of(path) or ".", dir_fd=self._root, follow_symlinks=False).st_ino
        except OSError:
            return None

    def _note(
        self, kind: OperationKind, path: str, began: float, handle: int | None = None, *, file: int | None = None,
        **more: object,
    ) -> None:  # fmt: skip
        """Must be called with the lock."""
        tid = mfusepy.fuse_get_context()[2]
        known, opener = self._by_handle.get(handle or 0, (file, tid))
        by = tid or opener  # no thread is named when the kernel writes a mapped file back
        self._notes.add(kind, _name_of(path), began, time.monotonic(), tid, by, file=known, **more)

    def destroy(self, path: str) -> None:
        """Ends the recording. FUSE calls it when the folder is unmounted."""
        self._notes.close()


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _name_of(path: str) -> str:
    return path.lstrip("/")


def main(folder: str, source: str, switch: str, home: str) -> int:
    if not is_given():
        return 1
    nothing = Spoiler(Rules((), ()), Path(switch), Path(home, "spoilt"))
    return serve(RecordingFs(folder, nothing, Mount(folder, source), Path(home)), folder, source)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
