"""Makes sure that changes are on disk, and finds when a file was made."""

from __future__ import annotations

import os
import struct
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Returns when the entries of the folder are on disk: the names of files that were made, renamed or removed in
    it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def owner_only(path: str, flags: int) -> int:
    """An `opener` for open(): only the owner can read a new file, and a symbolic link is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def write_atomically(path: Path, text: str, private: bool = False) -> None:
    """Replace the file in one step, so that a reader sees the old or the new text and never half of it. `private`: only
    its owner may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "w", encoding="utf-8", opener=owner_only if private else None) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def born_ns(path: Path) -> int:
    """When the file was made, in nanoseconds since the epoch, by statx(2); 0 if that is not known. An inode number
    alone does not identify a file, because file systems give the number of a removed file to a new file."""
    import ctypes  # slow to import, and the reaper must start quickly

    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    buffer = ctypes.create_string_buffer(256)
    at_fdcwd, symlink_nofollow, btime = -100, 0x100, 0x800
    if statx is None or statx(at_fdcwd, os.fsencode(path), symlink_nofollow, btime, buffer) != 0:
        return 0
    (mask,) = struct.unpack_from("<I", buffer, 0)
    seconds, nanoseconds = struct.unpack_from("<qI", buffer, 80)
    return int(seconds * 10**9 + nanoseconds) if mask & btime else 0
