"""The registry of this user's runs that may have left something to undo, wherever their run directories are.

    STATE/runs/RUN_ID/run.json          the fields of an `OpenRun`
    STATE/runs/RUN_ID/undo/undo.jsonl   a hard link to its undo log; on another file system a copy that the reaper keeps

STATE is $XDG_STATE_HOME/torchaos, by default ~/.local/state/torchaos; it survives a reboot. The reaper makes the entry
before anything can be guarded. The process that has verified that everything is undone removes it. Because of the link,
an entry can be healed like a run directory, even if the run directory was deleted."""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping

from torchaos.harness.host import processes
from torchaos.harness.host.disk import sync_folder
from torchaos.harness.rollback import undo_log

Who = tuple[int, int]  # pid and start time in clock ticks since boot
_UNFINISHED_S = 60.0  # seconds after which an entry without run.json was left by a dead process
_LONGEST = 120  # characters of a run id that go into a file name; the end of an id is unique


@dataclass(frozen=True)
class OpenRun:
    """A run that was started, and whose changes were not yet verified as undone."""

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
        """The folder with the undo log: the run directory, or, if that is gone, the entry."""
        run_dir = Path(self.run_dir)
        return run_dir if undo_log.path_of(run_dir).exists() else _runs() / _name(self.run_id)


def state_home() -> Path:
    """The state directory. Raises OSError if it is a link, or others own it or can write to it."""
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise PermissionError("this user has no home directory; set XDG_STATE_HOME") from error
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return private(home / "torchaos")


def private(folder: Path) -> Path:
    """Make the folder with mode 0700. Raises PermissionError if it is a link, or others can write to it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return checked(folder)


def checked(folder: Path) -> Path:
    """The folder, which must exist. Raises PermissionError if it is a link, or others can write to it."""
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(f"{folder}: it must be a folder of yours that nobody else can write to, and no link")
    return folder


def add(run: OpenRun) -> Path | None:
    """Adds a run to the list of open runs, with a link to its undo log. The entry is on disk when this returns. Returns
    None; or, if no link can be made, the path at which the caller must keep a copy of the log. Raises OSError."""
    folder = private(_runs() / _name(run.run_id))
    place: Path | None = undo_log.path_of(private_parent(folder))
    with suppress(OSError):
        undo_log.path_of(folder).unlink(missing_ok=True)
        os.link(undo_log.path_of(Path(run.run_dir)), undo_log.path_of(folder))
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
    private(undo_log.path_of(folder).parent)
    return folder


def remove(run_id: str) -> None:
    """Removes the entry of a run, if there is one. Must be called only after everything is undone. Raises OSError."""
    _remove(_runs() / _name(run_id))


def settle(run_id: str, run_dir: Path) -> bool:
    """Removes the entry if the undo log says that everything is undone. Returns whether it was removed."""
    with suppress(OSError):
        records, damaged = undo_log.read(run_dir)
        if not damaged and not any(record.open for record in records):
            remove(run_id)
            return True
    return False


def entries() -> tuple[list[OpenRun], list[str]]:
    """Every open run, the oldest first, and the problems with entries that can't be read. Raises OSError if the state
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
    """The run of a run directory, from the first line of its undo log. Raises OSError if there is no log or it belongs
    to another user, ValueError if it can't be read."""
    info = os.lstat(run_dir)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise PermissionError(f"{run_dir}: it is a link, or another user's")
    with open(os.open(undo_log.path_of(run_dir), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
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
    for path in (undo_log.path_of(folder), folder / ".run.json", folder / "run.json"):
        path.unlink(missing_ok=True)
    for path in (undo_log.path_of(folder).parent, folder):
        with suppress(FileNotFoundError):
            path.rmdir()
