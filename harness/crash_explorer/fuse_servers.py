"""Serves the checkpoint folder over itself by FUSE, and notes what a job does there:

    python -m torchaos.harness.crash_explorer.fuse_servers KIND FOLDER SOURCE SWITCH HOME

The server is that of the storage faults, without a fault. It sees every write of every library and language. Writes to
a mapped file (mmap) are seen only when the kernel writes them back, which is later than the job made them.

KIND is `recording` or `looks`. With `recording`, HOME gets the recording (recording_log.py) of what each process does
to the folder; an operation is noted when it ends.

With `looks`, HOME gets the file `looks`: a line for each question that a resume asked of the folder for the first time,
with the time. The folder was just covered, so the kernel's cache has nothing of it, and the kernel asks the server.
Questions about paths that the resume itself has made or removed are not noted: the answer is the same from each state
that gave the same answers before. Before the kernel opens, removes or renames a path, it looks the path up, and the
server sees the same call as for a stat. So if the same thread changes the path just afterwards, the lookup counts only
as the question what is there, not how large it is: the old bytes of a file that is written anew make no difference."""

from __future__ import annotations

import itertools
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mfusepy

from torchaos.harness.crash_explorer.operations import OperationKind
from torchaos.harness.crash_explorer.recording_log import Note, Query, RecordingLog, TreeRemoval, is_given
from torchaos.harness.fault_drivers.storage_faults import Rules
from torchaos.harness.fault_drivers.storage_fs import FaultyFs, FaultyOperations, serve
from torchaos.harness.rollback.file_handles import Mount

_HIDDEN = ".fuse_hidden"  # libfuse gives such a name to a file that is removed while it is open


class RecordingFs(FaultyFs):
    """Serves the folder and records the operations. A change and its line are written under one lock, so the order of
    lines is the order of changes. Only a sync may take time; its line says which changes it covers."""

    def __init__(self, folder: str, spoil: FaultyOperations, mount: Mount, home: Path) -> None:
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
        """Records the close of a file. FUSE calls this at each close(2), also of a copy of the file handle."""
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
        if new or inode not in self._by_inode:  # a new file may get the inode number of a removed file
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
        """Writes the line of an operation. The caller must hold the lock."""
        tid = mfusepy.fuse_get_context()[2]
        known, opener = self._by_handle.get(handle or 0, (file, tid))
        by = tid or opener  # the kernel names no thread when it writes a mapped file back
        self._notes.add(kind, _name_of(path), began, time.monotonic(), tid, by, file=known, **more)

    def destroy(self, path: str) -> None:
        """Ends the recording. FUSE calls it when the folder is unmounted."""
        self._notes.close()


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _name_of(path: str) -> str:
    return path.lstrip("/")


class ReadTraceFs(FaultyFs):
    """Serves the folder and notes the questions."""

    def __init__(self, folder: str, spoil: FaultyOperations, mount: Mount, home: Path) -> None:
        super().__init__(folder, spoil, mount)
        self._lines = os.open(home / "looks", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.RLock()
        self._asked: set[tuple[Query, str]] = set()
        self._made: set[str] = set()  # paths that the resume has made anew, or removed
        self._folders: set[str] = set()  # the same for folders, with all that is below them
        self._looked_up: dict[int, tuple[str, float]] = {}  # the last lookup of each thread, and its time
        self._clearing: dict[int, TreeRemoval] = {}  # by thread

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        with self._lock:
            self._settle()
            if fh:
                self._note(Query.IS, path)
            else:
                self._looked_up[mfusepy.fuse_get_context()[2]] = (path, time.monotonic())
        return super().getattr(path, fh)

    def readdir(self, path: str, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
        with self._lock:
            self._settle()
            if not self._is_made(path.strip("/")):
                self._write(self._cleared.look_through(path.strip("/"), time.monotonic()))
        return super().readdir(path, fh)

    def open(self, path: str, flags: int) -> int:
        if not flags & os.O_TRUNC:
            self._ask(Query.BYTES, path)
            return super().open(path, flags)
        self._settle(path)
        handle = super().open(path, flags)
        self._make(path)
        return handle

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._settle(path)
        handle = super().create(path, mode, fi)
        self._make(path)
        return handle

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._settle(path)
        if length:
            self._note(Query.BYTES, path)
        done = super().truncate(path, length, fh)
        self._make(path)
        return done

    def unlink(self, path: str) -> int:
        self._settle(path, removed=True)
        done = super().unlink(path)
        self._make(path)
        return done

    def mkdir(self, path: str, mode: int) -> int:
        self._settle(path)
        done = super().mkdir(path, mode)
        self._make(path, folder=True)
        return done

    def rmdir(self, path: str) -> int:
        self._settle(path, removed=True)
        done = super().rmdir(path)
        with self._lock:
            cleared = self._cleared.remove_folder(path.strip("/"))
            if cleared is None:
                self._note(Query.NAMES, path)
            else:
                self._write(cleared)
        self._make(path, folder=True)
        return done

    def rename(self, old: str, new: str) -> int:
        self._settle(old, new)
        folder = stat.S_ISDIR(self._mode(old))
        self._note(Query.ALL if folder else Query.BYTES, old)
        self._note(Query.KIND, old)  # or the target of a link
        self._note(Query.NAMES if folder else Query.KIND, new)
        done = super().rename(old, new)
        self._make(old, folder)
        self._make(new, folder)
        return done

    def link(self, target: str, source: str) -> int:
        self._ask(Query.BYTES, source)
        done = super().link(target, source)
        self._make(target)
        return done

    def symlink(self, target: str, source: str) -> int:
        self._settle(target)
        done = super().symlink(target, source)
        self._make(target)
        return done

    def readlink(self, path: str) -> str:
        self._ask(Query.IS, path)
        return super().readlink(path)

    def destroy(self, path: str) -> None:
        """Notes the last lookups, which were followed by no change. FUSE calls this when the folder is unmounted."""
        with self._lock:
            for clearing in self._clearing.values():
                self._write(clearing.end())
            last = ((looked_up.strip("/"), at_s) for looked_up, at_s in self._looked_up.values())
            self._write([(Query.IS, looked_up, at_s) for looked_up, at_s in last if not self._is_made(looked_up)])

    def _mode(self, path: str) -> int:
        try:
            return os.stat(path.lstrip("/") or ".", dir_fd=self._root, follow_symlinks=False).st_mode
        except OSError:
            return 0

    def _ask(self, ask: Query, path: str) -> None:
        with self._lock:
            self._settle()
            self._note(ask, path)

    @property
    def _cleared(self) -> TreeRemoval:
        """The folders that the calling thread is removing."""
        return self._clearing.setdefault(mfusepy.fuse_get_context()[2], TreeRemoval())

    def _settle(self, *changed: str, removed: bool = False) -> None:
        """Notes the thread's last lookup. `changed`: the paths that the thread now makes anew, or removes
        (`removed`)."""
        with self._lock:
            path, at_s = self._looked_up.pop(mfusepy.fuse_get_context()[2], ("", 0.0))
            if path:
                self._note(Query.KIND if path in changed else Query.IS, path, at_s)
            if changed:
                own = self._cleared
                self._write(own.remove(changed[0].strip("/")) if removed else own.end())

    def _make(self, path: str, folder: bool = False) -> None:
        with self._lock:
            (self._folders if folder else self._made).add(path.strip("/"))

    def _note(self, ask: Query, path: str, at_s: float | None = None) -> None:
        with self._lock:
            path, at_s = path.strip("/"), time.monotonic() if at_s is None else at_s
            if self._is_made(path):
                return
            own = self._cleared
            if own.is_open:
                known = (
                    Query.KIND if ask is Query.IS and stat.S_ISDIR(self._mode(path)) else ask
                )  # folders have no size
                if own.keeps(known, path, at_s):
                    return
            self._write([*own.end(), (ask, path, at_s)])

    def _write(self, notes: Sequence[Note]) -> None:
        for ask, path, at_s in notes:
            if (ask, path) not in self._asked:
                self._asked.add((ask, path))
                os.write(self._lines, json.dumps([at_s, ask.value, path]).encode() + b"\n")

    def _is_made(self, path: str) -> bool:
        parts = path.split("/")
        above = ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
        return path in self._made or any(folder in self._folders for folder in above)


_KINDS = {"recording": RecordingFs, "looks": ReadTraceFs}


def main(kind: str, folder: str, source: str, switch: str, home: str) -> int:
    if not is_given():
        return 1
    nothing = FaultyOperations(Rules((), ()), Path(switch), Path(home, "spoilt"))
    return serve(_KINDS[kind](folder, nothing, Mount(folder, source), Path(home)), folder, source)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
