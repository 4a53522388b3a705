"""Serves a folder over itself by FUSE: reads and writes go to the folder below, except for operations that the rules
make fail, slow or hang. Runs as its own process until the folder is unmounted:

    python -m torchaos.harness.fault_drivers.storage_fs FOLDER SOURCE SWITCH LOG

The rules come from standard input. SWITCH is a file: when it is removed, nothing fails any more, and hanging operations
go on. LOG gets a line for each operation that was changed. The folder is opened before it is covered, so its files stay
in place: after unmounting, all files are visible, including those that were written under the fault. mfusepy:
https://github.com/mxmlnkn/mfusepy"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mfusepy

from torchaos.harness.fault_drivers.storage_faults import GROWS, Rules, rank_of
from torchaos.harness.rollback.file_handles import Mount

_LOOK_S = 0.01  # seconds
_STAT = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize")


class FaultyOperations:
    """Decides for each operation whether it fails, waits or passes, and writes the log."""

    def __init__(self, rules: Rules, switch: Path, log: Path) -> None:
        self._rules, self._switch = rules, switch
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._written = 0

    def __call__(self, operation: str, path: str, size: int = 0) -> None:
        """Returns when the operation may go on. Raises OSError if it must fail."""
        rules = self._rules
        if operation not in rules.operations or not self.is_on():
            return
        rank = rank_of(mfusepy.fuse_get_context()[2])
        if rank not in rules.ranks:
            return
        with self._lock:
            room = rules.left is not None and self._written + size <= rules.left
            self._written += size if room else 0
        if room or (rules.left is not None and operation not in GROWS):
            return
        began = time.monotonic()
        self._say(operation, path, rank, rules.error or ("stall" if rules.stall else "delay"))
        delay = rules.delay_s + (size / rules.rate if rules.rate else 0.0)
        while self.is_on() and (rules.stall or time.monotonic() - began < delay):
            time.sleep(_LOOK_S)
        if rules.error:
            raise OSError(rules.number, os.strerror(rules.number))

    def free(self) -> bool:
        return self._rules.left is None or not self.is_on()

    def is_on(self) -> bool:
        return self._switch.exists()

    def _say(self, operation: str, path: str, rank: int | None, effect: str) -> None:
        line = {"operation": operation, "path": path, "rank": rank, "what": effect}
        os.write(self._log, json.dumps(line).encode() + b"\n")


class FaultyFs(mfusepy.Operations):  # type: ignore[misc]
    use_ns = True

    def __init__(self, folder: str, spoil: FaultyOperations, mount: Mount) -> None:
        self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._spoil, self._mount = spoil, mount

    def init(self, path: str) -> None:
        """Called by FUSE when the folder is mounted. If the fault was undone before the mount, unmounts the folder
        again."""
        if not self._spoil.is_on():
            threading.Thread(target=self._leave, daemon=True).start()

    def _leave(self) -> None:
        try:
            self._mount.undo()
        finally:
            os._exit(0)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._spoil("getattr", path)
        status = os.fstat(fh) if fh else os.stat(_below(path), dir_fd=self._root, follow_symlinks=False)
        times = {f"st_{letter}time": getattr(status, f"st_{letter}time_ns") for letter in "amc"}
        return {**{name: getattr(status, name) for name in _STAT}, **times}

    def readdir(self, path: str, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
        """The names in a folder, with kind and inode of each, as usual file systems give them, so that a program need
        not ask for the kind of each file."""
        self._spoil("readdir", path)
        folder = os.open(_below(path), os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._root)
        try:
            with os.scandir(folder) as entries:
                found = [(entry.name, {"st_mode": _kind(entry), "st_ino": entry.inode()}, 0) for entry in entries]
            about = {"st_mode": stat.S_IFDIR, "st_ino": os.fstat(folder).st_ino}
            return iter([(".", about, 0), ("..", about, 0), *found])
        finally:
            os.close(folder)

    def open(self, path: str, flags: int) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC)
        self._spoil("open_write" if writes else "open_read", path)
        return os.open(_below(path), flags & ~os.O_APPEND, dir_fd=self._root)  # the kernel gives each offset

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._spoil("create", path)
        return os.open(_below(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode, dir_fd=self._root)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._spoil("read", path, size)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._spoil("write", path, len(data))
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._spoil("truncate", path)
        own = os.open(_below(path), os.O_WRONLY, dir_fd=self._root) if fh is None else fh
        try:
            os.ftruncate(own, length)
        finally:
            if fh is None:
                os.close(own)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._spoil("fsync", path)
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._spoil("fsyncdir", path)
        os.fsync(self._root)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        return self._do("mkdir", path, lambda: os.mkdir(_below(path), mode, dir_fd=self._root))

    def rmdir(self, path: str) -> int:
        return self._do("rmdir", path, lambda: os.rmdir(_below(path), dir_fd=self._root))

    def unlink(self, path: str) -> int:
        return self._do("unlink", path, lambda: os.unlink(_below(path), dir_fd=self._root))

    def rename(self, old: str, new: str) -> int:
        return self._do("rename", old, lambda: os.rename(
            _below(old), _below(new), src_dir_fd=self._root, dst_dir_fd=self._root))  # fmt: skip

    def link(self, target: str, source: str) -> int:
        return self._do("link", target, lambda: os.link(
            _below(source), _below(target), src_dir_fd=self._root, dst_dir_fd=self._root))  # fmt: skip

    def symlink(self, target: str, source: str) -> int:
        return self._do("symlink", target, lambda: os.symlink(source, _below(target), dir_fd=self._root))

    def readlink(self, path: str) -> str:
        self._spoil("readlink", path)
        return os.readlink(_below(path), dir_fd=self._root)

    def chmod(self, path: str, mode: int) -> int:
        return self._do("chmod", path, lambda: os.chmod(_below(path), mode, dir_fd=self._root))

    def chown(self, path: str, uid: int, gid: int) -> int:
        return self._do("chown", path, lambda: os.chown(
            _below(path), uid, gid, dir_fd=self._root, follow_symlinks=False))  # fmt: skip

    def utimens(self, path: str, times: tuple[int, int]) -> int:
        return self._do("utimens", path, lambda: os.utime(_below(path), ns=times, dir_fd=self._root))

    def statfs(self, path: str) -> dict[str, int]:
        self._spoil("statfs", path)
        status = os.fstatvfs(self._root)
        fields = {name: getattr(status, name) for name in dir(status) if name.startswith("f_") and name != "f_fsid"}
        return fields if self._spoil.free() else {**fields, "f_bavail": 0, "f_bfree": 0}

    def _do(self, operation: str, path: str, work: Callable[[], object]) -> int:
        self._spoil(operation, path)
        work()
        return 0


def _below(path: str) -> str:
    return path.lstrip("/") or "."


def main(folder: str, source: str, switch: str, log: str) -> int:
    rules = Rules.from_json(sys.stdin.read())
    return serve(
        FaultyFs(folder, FaultyOperations(rules, Path(switch), Path(log)), Mount(folder, source)), folder, source
    )


def _kind(entry: os.DirEntry[str]) -> int:
    """The kind of a directory entry, as in the mode of a file. 0 if it is none of the usual kinds."""
    kinds = (entry.is_symlink(), stat.S_IFLNK), (entry.is_dir(), stat.S_IFDIR), (entry.is_file(), stat.S_IFREG)
    return next((kind for is_this, kind in kinds if is_this), 0)


def serve(served: FaultyFs, folder: str, source: str) -> int:
    """Serves the folder until it is unmounted. Returns an exit code."""
    options = {"allow_other": True} if os.geteuid() == 0 else {}
    try:
        mfusepy.FUSE(
            served, folder, foreground=True, fsname=source, attr_timeout=0, entry_timeout=0, max_threads=64,
            use_ino=True,  # manifests recognise a renamed file by its inode
            **options,
        )  # fmt: skip
    except RuntimeError as error:
        print(f"{folder}: it can't be served: {error}", file=sys.stderr)
        return errno.EIO
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
