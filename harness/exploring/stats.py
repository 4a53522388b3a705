"""What lies in a folder, to find out later what was changed there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Stats = Mapping[str, tuple[int, int, int]]  # inode, size in bytes and time of change in ns, by path


def stats_of(folder: Path) -> Stats:
    """All files, folders and links below the folder."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[path.relative_to(folder).as_posix()] = (
            (status.st_ino, 0, 0) if path.is_dir() else (status.st_ino, status.st_size, status.st_mtime_ns)
        )
    return found
