"""The code that the servers of the checkpoint folder share. A server is started for each resume and must start quickly,
so this module imports little.

A server needs a permit before it covers the folder: the undo of its mount must be on disk first. A server whose harness
has died gets no permit. While a job runs, a recording is written to the files `operations` (a line for each operation),
the bytes in `blobs/`, `collectives` and `plans` (operations.py), and `doubts`; recorded_run.py reads them afterwards.

The server of a resume notes the questions about paths that a job asks. If a thread lists a folder and at once removes
it with all its contents, as shutil.rmtree does, this counts as one question: a job that removes what a dead attempt
left does the same, however many files there are. So the names in such a folder are noted without their digits, and each
only once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from torchaos.harness.crash_explorer.folder_contents import Blobs
from torchaos.harness.crash_explorer.operations import OperationKind, Writers


class Query(str, Enum):
    """A question about a path."""

    KIND = "kind"  # what is there: nothing, a folder, a link and its target, or a file
    IS = "is"  # the same, and the size of a file
    NAMES = "names"  # of what a folder contains, and their kinds
    BYTES = "bytes"  # of a file
    ALL = "all"  # that is in a folder and below it
    CLEARED = "cleared"  # the kinds of names in and below a folder that is then removed, without numbers


Note = tuple[Query, str, float]  # a question, its path, and its time


@dataclass
class _Listed:
    """A folder that was listed; since then, nothing but entries of it was removed."""

    path: str
    at_s: float
    notes: list[Note] = field(default_factory=list)  # questions that only count if the folder is not removed

    def has(self, path: str) -> bool:
        return not self.path or path.startswith(f"{self.path}/")


class TreeRemoval:
    """The folders that one thread is removing, the outermost first. All paths are without a leading slash."""

    def __init__(self) -> None:
        self._open: list[_Listed] = []

    def look_through(self, path: str, at_s: float) -> list[Note]:
        """The thread lists a folder. Returns questions that count now."""
        due = [] if self._open and self._open[-1].has(path) else self.end()
        self._open.append(_Listed(path, at_s))
        return due

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def keeps(self, ask: Query, path: str, at_s: float) -> bool:
        """Whether a question is kept back, because it counts only if the folder is not removed after all. Such a
        question asks what a path is just before its removal, or whether the folder itself is there."""
        inside = ask is Query.KIND and self._open[-1].has(path)
        if inside:
            self._open[-1].notes.append((ask, path, at_s))
        return inside or any(path == listed.path for listed in self._open)

    def remove(self, path: str) -> list[Note]:
        """The thread is about to remove a file or a folder. Returns questions that count now."""
        return [] if self._open and (self._open[-1].has(path) or self._open[-1].path == path) else self.end()

    def remove_folder(self, path: str) -> list[Note] | None:
        """The thread has removed a folder. Returns questions that count now. None if the removal does not fit: the
        thread had not listed the folder, or had not removed all its entries."""
        if not self._open or self._open[-1].path != path:
            return None
        gone = self._open.pop()
        note = (Query.CLEARED, path, gone.at_s)
        if not self._open:
            return [note]
        self._open[-1].notes.append(note)
        return []

    def end(self) -> list[Note]:
        """The thread does something else. Returns questions that count now."""
        open_, self._open = self._open, []
        return [note for listed in open_ for note in ((Query.NAMES, listed.path, listed.at_s), *listed.notes)]


PERMIT = "mount\n"


def is_given() -> bool:
    """Waits for the end of the input. Returns whether the input was a permit to cover the folder."""
    return sys.stdin.read() == PERMIT


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


class RecordingLog:
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
