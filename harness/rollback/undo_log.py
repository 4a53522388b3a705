"""The undo log of a run, and the registry of open runs: the runs of this user that may have something to undo, wherever
their run directories are.

The undo log is RUN_DIR/undo/undo.jsonl. It has the changes that must be undone, and those that have been undone. Each
line is a JSON object:

    {"run_id", "harness": [pid, start_ticks], "reaper": the same, "boot", "host", "version"}      the first line
    {"record", "state": "planned", "owner", "limit_s", "handles", "irreversible"}   before the fault is applied
    {"record", "state": ..., "why"}                                                 a later state of the record

One process at a time writes the log and holds a lock on it: the reaper or, after its death, the process that undoes
the changes instead. A line counts when it is on disk. An incomplete last line was never acknowledged, so no change was
made after it.

The registry has an entry for each open run:

    STATE/runs/RUN_ID/run.json          the fields of an `OpenRun`
    STATE/runs/RUN_ID/undo/undo.jsonl   a hard link to its undo log; on another file system a copy that the reaper keeps

STATE is $XDG_STATE_HOME/torchaos, by default ~/.local/state/torchaos; it survives a reboot. The reaper makes the entry
before the first undo record is written. The process that has verified that everything is undone removes the entry. If
the run directory was deleted, its changes can still be undone, because the entry has a link to the undo log."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torchaos.harness.host import processes
from torchaos.harness.host.disk import sync_folder

VERSION = 1


class State(str, Enum):
    PLANNED = "planned"  # the undo is on disk
    MAYBE_APPLIED = "maybe_applied"
    APPLIED = "applied"
    ROLLED_BACK = "rolled_back"  # every handle was undone, but not verified yet
    VERIFIED = "verified"
    FAILED = "failed"  # the reason is in `why`; the next undo tries again


@dataclass
class UndoRecord:
    """The undo of one fault, or of the things that a launcher makes."""

    id: str
    owner: str
    handles: Sequence[Mapping[str, Any]] = ()  # the handles as JSON, in the order of the changes
    irreversible: str | None = None  # why the change can't be undone
    limit_s: float | None = None  # this many seconds after the record was written, it is undone in any case
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
        """The record in a line of the log. Raises ValueError if the line is not an undo record."""
        record, owner, handles = line.get("record"), line.get("owner"), line.get("handles")
        irreversible, limit_s = line.get("irreversible"), line.get("limit_s")
        if not (
            isinstance(record, str) and isinstance(owner, str)
            and isinstance(handles, list) and all(isinstance(handle, dict) for handle in handles)
            and isinstance(irreversible, (str, type(None))) and isinstance(limit_s, (int, float, type(None)))
        ):  # fmt: skip
            raise ValueError("not an undo record")
        return cls(record, owner, tuple(handles), irreversible, limit_s)


def path_of(run_dir: Path) -> Path:
    return run_dir / "undo" / "undo.jsonl"


def is_begun(run_dir: Path) -> bool:
    """Whether there is a log with a complete line. Otherwise nothing was ever changed. Raises OSError if the log can't
    be read."""
    try:
        return b"\n" in path_of(run_dir).read_bytes()
    except FileNotFoundError:
        return False


class UndoLog:
    """The undo log, open for its only writer. Raises OSError if it can't be opened: BlockingIOError if another process
    has had it open for writing for `wait_s` seconds, PermissionError if it belongs to another user."""

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
        """From now on, keeps a copy of the whole log at `path`. Raises OSError if it can't be written."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._lock:
            self._copy = os.open(path, flags, 0o600)
            os.write(self._copy, os.pread(self._fd, self._end, 0))
            os.fsync(self._copy)
        sync_folder(path.parent)

    def header(self, about: Mapping[str, Any]) -> None:
        """Writes the first line: the fields of an `OpenRun`."""
        self.append({**about, "version": VERSION})

    def close(self) -> None:
        for fd in (self._fd, self._copy):
            if fd is not None:
                os.close(fd)


def read(run_dir: Path) -> tuple[list[UndoRecord], list[int]]:
    """Two lists: the undo records, each with its last state, in the order in which they were written; and the numbers
    of damaged lines. An incomplete last line is ignored. Raises OSError if the log can't be read."""
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
    """The path that the run directory had when the log was begun, from the first line. Empty if that line is
    damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError), open(path_of(run_dir), "rb") as file:
        return [Path(json.loads(file.readline())["run_dir"])]
    return []


def _take(line: Mapping[str, Any], records: dict[str, UndoRecord]) -> None:
    if "record" not in line and "run_id" in line:
        return
    state = State(line["state"])
    if state is State.PLANNED:
        records.pop(line["record"], None)  # written again after it was undone: it moves to the end
        records[line["record"]] = UndoRecord.from_line(line)
    else:
        records[line["record"]].state = state


def _lock(fd: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise BlockingIOError("another process is undoing this run") from None
            time.sleep(0.01)


def _cut_torn_line(fd: int) -> int:
    """Removes an incomplete last line, and returns the size of the file in bytes."""
    size = os.fstat(fd).st_size
    whole = os.pread(fd, size, 0).rfind(b"\n") + 1
    if whole < size:
        os.ftruncate(fd, whole)
    return whole


Who = tuple[int, int]  # pid and start time in clock ticks since boot
_UNFINISHED_S = 60.0  # seconds after which an entry without run.json was left by a dead process
_LONGEST = 120  # characters of a run id that are used in a file name: the last ones, which are unique


@dataclass(frozen=True)
class OpenRun:
    """A run that was started, and whose changes are not yet verified as undone."""

    run_id: str
    run_dir: str
    harness: Who
    reaper: Who
    boot: str  # boot id that the start times belong to
    host: str
    since_s: float  # seconds since the epoch

    @classmethod
    def of(cls, run_id: str, run_dir: Path, harness: Who) -> OpenRun:
        """The entry of a run whose reaper is this process."""
        reaper = (os.getpid(), processes.ticks_of(os.getpid()))
        return cls(run_id, str(run_dir), harness, reaper, processes.boot_id(), processes.host(), time.time())

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> OpenRun:
        """The entry of a run, from its JSON. Raises ValueError if `raw` is no such entry."""
        try:
            harness, reaper = ((int(pid), int(ticks or 0)) for pid, ticks in (raw["harness"], raw["reaper"]))
            texts = [raw[name] for name in ("run_id", "run_dir", "boot", "host")]
            if not (all(isinstance(text, str) for text in texts) and raw["run_id"]):
                raise ValueError("not the entry of a run")
            run_id, run_dir, boot, host = texts
            return cls(run_id, run_dir, harness, reaper, boot, host, float(raw["since_s"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the entry of a run: {error}") from error

    @property
    def here(self) -> bool:
        """Whether the run was on this machine. Several machines may share a home directory."""
        return self.host == processes.host()

    def lives(self, who: Who) -> bool:
        return self.boot == processes.boot_id() and processes.is_alive(*who)

    @property
    def folder(self) -> Path:
        """The folder with the undo log: the run directory or, if that is gone, the entry in the registry."""
        run_dir = Path(self.run_dir)
        return run_dir if path_of(run_dir).exists() else _runs() / _name(self.run_id)


def state_home() -> Path:
    """The state directory. Raises OSError if it is a link, if another user owns it, or if others can write to it."""
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise PermissionError("this user has no home directory; set XDG_STATE_HOME") from error
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return private(home / "torchaos")


def private(folder: Path) -> Path:
    """Makes the folder with mode 0700. Raises PermissionError if it is a link, or if others can write to it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return checked(folder)


def checked(folder: Path) -> Path:
    """The folder, which must exist. Raises PermissionError if it is a link, or if others can write to it."""
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(f"{folder}: it must be a folder of yours that nobody else can write to, and no link")
    return folder


def add(run: OpenRun) -> Path | None:
    """Adds a run to the registry of open runs, with a link to its undo log. The entry is on disk when this returns.
    Returns None or, if no link can be made, the path at which the caller must keep a copy of the log. Raises OSError if
    the entry can't be written."""
    folder = private(_runs() / _name(run.run_id))
    place: Path | None = path_of(private_parent(folder))
    with suppress(OSError):
        path_of(folder).unlink(missing_ok=True)
        os.link(path_of(Path(run.run_dir)), path_of(folder))
        place = None
    partial = folder / ".run.json"
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        json.dump(asdict(run), file)
        file.flush()
        os.fsync(fd)
    partial.rename(folder / "run.json")
    for changed in (folder, folder.parent):
        sync_folder(changed)
    return place


def private_parent(folder: Path) -> Path:
    """Makes the folder for the log in `folder`, and returns `folder`."""
    private(path_of(folder).parent)
    return folder


def remove(run_id: str) -> None:
    """Removes the entry of a run, if there is one. Must be called only when everything is undone. Raises OSError if it
    can't be removed."""
    _remove(_runs() / _name(run_id))


def settle(run_id: str, run_dir: Path) -> bool:
    """Removes the entry if the undo log shows that everything is undone. Returns whether the entry was removed."""
    with suppress(OSError):
        records, damaged = read(run_dir)
        if not damaged and not any(record.open for record in records):
            remove(run_id)
            return True
    return False


def entries() -> tuple[list[OpenRun], list[str]]:
    """All open runs, the oldest first, and the problems with entries that can't be read. Raises OSError if the state
    directory can't be used."""
    runs, problems = [], []
    for folder in sorted(_runs().iterdir()):
        try:
            checked(folder)
            fd = os.open(folder / "run.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(fd) as file:
                if os.fstat(fd).st_uid != os.geteuid():
                    raise PermissionError("it is another user's")
                runs.append(OpenRun.from_json(json.load(file)))
        except FileNotFoundError:
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > _UNFINISHED_S:
                    _remove(folder)
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{folder}: it can't be read: {error}; look into it, and remove it")
    return sorted(runs, key=lambda run: run.since_s), problems


def of_folder(run_dir: Path) -> OpenRun:
    """The open run of a run directory, from the first line of its undo log. Raises OSError if there is no log or it
    belongs to another user, ValueError if the line can't be read."""
    info = os.lstat(run_dir)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise PermissionError(f"{run_dir}: it is a link, or another user's")
    with open(os.open(path_of(run_dir), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise PermissionError(f"{run_dir}: its undo log is another user's")
        raw = json.loads(file.readline())
    if not isinstance(raw, dict):
        raise ValueError("its first line is not that of an undo log")
    return OpenRun.from_json({"harness": (0, 0), "host": processes.host(), "since_s": raw.get("wall_s", 0.0), **raw,
                              "run_dir": str(run_dir.resolve())})  # fmt: skip


def _runs() -> Path:
    return private(state_home() / "runs")


def _name(run_id: str) -> str:
    return run_id.replace("/", "_")[-_LONGEST:].lstrip(".") or "run"


def _remove(folder: Path) -> None:
    for path in (path_of(folder), folder / ".run.json", folder / "run.json"):
        path.unlink(missing_ok=True)
    for path in (path_of(folder).parent, folder):
        with suppress(FileNotFoundError):
            path.rmdir()
