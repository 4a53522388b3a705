"""The questions about a path that a job can ask a file system, and folders that a thread lists and then removes at
once."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

# The questions about a path that a job can ask a file system. This module is apart from read_trace.py because the
# server that notes the questions is started for each resume, and must start quickly.


class Ask(str, Enum):
    """A question about a path."""

    KIND = "kind"  # what is there: nothing, a folder, a link and its target, or a file
    IS = "is"  # the same, and the size of a file
    NAMES = "names"  # of what a folder contains, and their kinds
    BYTES = "bytes"  # of a file
    ALL = "all"  # that is in a folder and below it
    CLEARED = "cleared"  # the kinds of names in a folder and below it, without numbers: all of it is then removed


# Folders that a thread lists and then removes at once, with all that is in them, as shutil.rmtree does. A job that
# removes what a dead attempt left does the same, however many files there are. So of such a folder only the kinds of
# names count, without numbers. This module is apart from read_trace.py for the same reason as read_queries.py.

Note = tuple[Ask, str, float]  # a question, its path, and its time


@dataclass
class _Listed:
    """A folder that was listed, and of which nothing but entries was removed since then."""

    path: str
    at_s: float
    notes: list[Note] = field(default_factory=list)  # questions that only count if the folder is not removed

    def has(self, path: str) -> bool:
        return not self.path or path.startswith(f"{self.path}/")


class Clearing:
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

    def keeps(self, ask: Ask, path: str, at_s: float) -> bool:
        """Whether the question only counts if the folder is not removed after all: what is there, just before it is
        removed; or whether the folder itself is there."""
        inside = ask is Ask.KIND and self._open[-1].has(path)
        if inside:
            self._open[-1].notes.append((ask, path, at_s))
        return inside or any(path == listed.path for listed in self._open)

    def remove(self, path: str) -> list[Note]:
        """The thread is about to remove a file or a folder. Returns questions that count now."""
        return [] if self._open and (self._open[-1].has(path) or self._open[-1].path == path) else self.end()

    def remove_folder(self, path: str) -> list[Note] | None:
        """The thread has removed a folder. Returns questions that count now; None if it had not listed the folder and
        removed all its entries."""
        if not self._open or self._open[-1].path != path:
            return None
        gone = self._open.pop()
        note = (Ask.CLEARED, path, gone.at_s)
        if not self._open:
            return [note]
        self._open[-1].notes.append(note)
        return []

    def end(self) -> list[Note]:
        """The thread does something else. Returns questions that count now."""
        open_, self._open = self._open, []
        return [note for listed in open_ for note in ((Ask.NAMES, listed.path, listed.at_s), *listed.notes)]
