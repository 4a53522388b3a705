"""The undo log, RUN_DIR/undo/undo.jsonl: the changes that must be undone, and those that have been undone. One JSON
object per line:

    {"run_id", "harness": [pid, start_ticks], "reaper": the same, "boot", "host", "version"}      the first line
    {"record", "state": "planned", "owner", "limit_s", "handles", "irreversible"}   before the fault is applied
    {"record", "state": ..., "why"}                                                 a later state of the record

One process at a time writes the log and holds a lock on it: the reaper or, after its death, the process that heals
instead. A line counts once it is on disk. An incomplete last line was never acknowledged, so no change was made after
it."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Mapping, Sequence

from torchaos.harness.host.disk import sync_folder

VERSION = 1


class State(str, Enum):
    PLANNED = "planned"  # guarded
    MAYBE_APPLIED = "maybe_applied"
    APPLIED = "applied"
    ROLLED_BACK = "rolled_back"  # every handle was restored; not verified yet
    VERIFIED = "verified"
    FAILED = "failed"  # the reason is in `why`; the next healer tries again


@dataclass
class UndoRecord:
    """The undo of one fault, or of one thing that the launcher makes."""

    id: str
    owner: str
    handles: Sequence[Mapping[str, Any]] = ()  # handles as JSON, in the order in which they are changed
    irreversible: str | None = None  # why the change can't be undone
    limit_s: float | None = None  # seconds after the guard at which it is undone in any case
    state: State = State.PLANNED

    @property
    def open(self) -> bool:
        """Whether something is left to undo."""
        return self.irreversible is None and self.state is not State.VERIFIED

    def to_line(self) -> dict[str, Any]:
        return {
            "record": self.id, "state": self.state.value, "owner": self.owner, "limit_s": self.limit_s,
            "handles": list(self.handles), "irreversible": self.irreversible,
        }  # fmt: skip

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> UndoRecord:
        """The record in a line of the log. Raises ValueError if the line is not a guarded record."""
        record, owner, handles = line.get("record"), line.get("owner"), line.get("handles")
        irreversible, limit_s = line.get("irreversible"), line.get("limit_s")
        if not (
            isinstance(record, str) and isinstance(owner, str)
            and isinstance(handles, list) and all(isinstance(handle, dict) for handle in handles)
            and isinstance(irreversible, (str, type(None))) and isinstance(limit_s, (int, float, type(None)))
        ):  # fmt: skip
            raise ValueError("not a guarded record")
        return cls(record, owner, tuple(handles), irreversible, limit_s)


def path_of(run_dir: Path) -> Path:
    return run_dir / "undo" / "undo.jsonl"


def is_begun(run_dir: Path) -> bool:
    """Whether there is a log with a whole line. Without one, nothing was ever changed. Raises OSError."""
    try:
        return b"\n" in path_of(run_dir).read_bytes()
    except FileNotFoundError:
        return False


class UndoLog:
    """The only writer of the log. Raises OSError if the log can't be opened: BlockingIOError if another process has had
    it open for writing for `wait_s` seconds, PermissionError if it belongs to another user."""

    def __init__(self, run_dir: Path, wait_s: float = 0.0, create: bool = True) -> None:
        path = path_of(run_dir)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self._fd, self._lock = os.open(path, flags, 0o600), threading.Lock()
        self._copy: int | None = None
        try:
            if os.fstat(self._fd).st_uid != os.geteuid():
                raise PermissionError(f"{path}: the undo log is another user's")
            _lock(self._fd, time.monotonic() + wait_s)
            self._end = _cut_torn_line(self._fd)
            sync_folder(path.parent)
            sync_folder(run_dir)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, line: Mapping[str, Any]) -> None:
        """Appends a line, which is on disk when this returns. Raises OSError if it can't be written; the log is then
        unchanged."""
        data = json.dumps({**line, "wall_s": time.time()}, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            try:
                if os.pwrite(self._fd, data, self._end) < len(data):
                    raise OSError("no room for a whole line")
                os.fsync(self._fd)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._fd, self._end)
                raise
            self._end += len(data)
            if self._copy is not None:
                with suppress(OSError):  # the log itself has the line
                    os.write(self._copy, data)
                    os.fsync(self._copy)

    def keep_copy(self, path: Path) -> None:
        """From now on, keep a copy of the whole log at `path`. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._lock:
            self._copy = os.open(path, flags, 0o600)
            os.write(self._copy, os.pread(self._fd, self._end, 0))
            os.fsync(self._copy)
        sync_folder(path.parent)

    def header(self, about: Mapping[str, Any]) -> None:
        """Write the first line: the fields of an `OpenRun`."""
        self.append({**about, "version": VERSION})

    def close(self) -> None:
        for fd in (self._fd, self._copy):
            if fd is not None:
                os.close(fd)


def read(run_dir: Path) -> tuple[list[UndoRecord], list[int]]:
    """Two lists: the undo records, each with its last state, in the order in which they were first written; and the
    numbers of damaged lines. An incomplete last line is ignored. Raises OSError if the log can't be read."""
    *lines, _torn = path_of(run_dir).read_bytes().split(b"\n")
    records: dict[str, UndoRecord] = {}
    damaged = []
    for number, line in enumerate(lines, 1):
        try:
            _take(json.loads(line), records)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            damaged.append(number)
    return list(records.values()), damaged


def folder_of(run_dir: Path) -> list[Path]:
    """The path of the run directory at the time when the log was begun, from its first line. Empty if that line is
    damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError), open(path_of(run_dir), "rb") as file:
        return [Path(json.loads(file.readline())["run_dir"])]
    return []


def _take(line: Mapping[str, Any], records: dict[str, UndoRecord]) -> None:
    if "record" not in line and "run_id" in line:
        return
    state = State(line["state"])
    if state is State.PLANNED:
        records.pop(line["record"], None)  # guarded again after it was healed: it moves to the end
        records[line["record"]] = UndoRecord.from_line(line)
    else:
        records[line["record"]].state = state


def _lock(fd: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise BlockingIOError("another process is healing this run") from None
            time.sleep(0.01)


def _cut_torn_line(fd: int) -> int:
    """Removes an incomplete last line, and returns the size of the file in bytes."""
    size = os.fstat(fd).st_size
    whole = os.pread(fd, size, 0).rfind(b"\n") + 1
    if whole < size:
        os.ftruncate(fd, whole)
    return whole
