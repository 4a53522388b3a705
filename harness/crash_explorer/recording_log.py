"""What the servers of the checkpoint folder share, light to import: the permit that a server needs, the files into
which a recording is written, and what lies in a folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from torchaos.harness.crash_explorer.folder_contents import Blobs
from torchaos.harness.crash_explorer.happens_before import Writers
from torchaos.harness.crash_explorer.operations import OperationKind

# The permit that a server needs before it covers the checkpoint folder: the undo of its mount must be guarded first. A
# server whose harness has died gets none. This module is apart from fuse_mount.py because servers must start quickly.

PERMIT = "mount\n"


def is_given() -> bool:
    """Waits for the end of the input. Returns whether the folder may be covered."""
    return sys.stdin.read() == PERMIT


# What lies in a folder, to find out later what was changed there.

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


# The files into which a recording is written while a job runs: `operations` (a line for each operation), the bytes in
# `blobs/`, `collectives` and `plans` (happens_before.py), and `doubts`. recorded_run.py reads them afterwards.


class Notes:
    """The files of one recording, in the folder `home`. The methods must not be called by two threads at once."""

    DOUBTS = "doubts"  # sentences about what could not be recorded
    NAMES = ("operations", "collectives", "plans")  # without the folder of blobs

    def __init__(self, home: Path) -> None:
        self.blobs, self._writers = Blobs(home / "blobs"), Writers(home / "collectives", home / "plans")
        self._lines = os.open(home / "operations", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.next = 0  # the number of the next operation
        self._doubts, self._doubted = home / self.DOUBTS, set[str]()

    def add(
        self, kind: OperationKind, path: str, began_s: float, ended_s: float, tid: int, by: int, **more: object
    ) -> None:
        """Adds an operation of the thread `by`. `tid`: the thread that made the call; 0: unknown. `more`: fields of
        Operation; None: the default."""
        writer = self._writers.of(by)
        fields = {
            "number": self.next, "kind": kind.value, "path": path, "rank": writer.rank, "pid": writer.pid, "tid": tid,
            "begun_s": began_s, "ended_s": ended_s, **more,
        }  # fmt: skip
        self.next += 1
        line = {name: value for name, value in fields.items() if value is not None}
        os.write(self._lines, json.dumps(line).encode() + b"\n")

    def doubt(self, sentence: str) -> None:
        """Notes once what could not be recorded."""
        if sentence not in self._doubted:
            self._doubted.add(sentence)
            with open(self._doubts, "a") as file:
                file.write(json.dumps(sentence) + "\n")

    def close(self) -> None:
        """Copies the last collectives."""
        self._writers.close()
