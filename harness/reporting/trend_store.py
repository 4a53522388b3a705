"""The history: the results of many runs in one SQLite file. The file is beside the folder with the run directories.
Only its owner can read it, and several processes may use it.

Runs whose directories were removed stay in the file. One row for each run: `result` holds the whole result.json; the
other columns are for queries."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.result import Result, each_restart
from torchaos.harness.record.rundir import RunDir, commit_in, result_in, results_in

Entry = TypeVar("Entry")

_WAIT_S = 30.0  # seconds to wait for another process that writes
_OURS = 0x746F7263  # "torc", in the file's header; see PRAGMA application_id
_NOT_OURS = "it is a database, but not a history of runs"
_TABLES = (
    """CREATE TABLE IF NOT EXISTS runs (
    run_dir TEXT PRIMARY KEY, scenario TEXT NOT NULL, seed INTEGER NOT NULL, started TEXT NOT NULL,
    "commit" TEXT NOT NULL, verdict TEXT NOT NULL, result TEXT NOT NULL
)""",
    "CREATE INDEX IF NOT EXISTS by_scenario ON runs (scenario, started)",
    """CREATE TABLE IF NOT EXISTS nights (
    folder TEXT PRIMARY KEY, name TEXT NOT NULL, seed INTEGER NOT NULL, started TEXT NOT NULL,
    "commit" TEXT NOT NULL, verdict TEXT NOT NULL, score TEXT NOT NULL
)""",
)


def path_of(out: Path) -> Path:
    """The path of the history of the folder `out`. It is beside the folder, so that a listing of `out` does not contain
    it."""
    whole = out.absolute()
    return whole.with_name(f"{whole.name}.sqlite") if whole.name else whole / "torchaos-runs.sqlite"


def add_rows(path: Path, table: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Adds rows to a table of the history at `path`. The file is made if it does not exist. A row with the same key is
    replaced. Raises UsageError if the file can't be used."""
    try:
        _claim(path)
        with closing(sqlite3.connect(path, timeout=_WAIT_S)) as database, database:
            database.execute("BEGIN IMMEDIATE")
            _prepare(database, path)
            database.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    except (sqlite3.Error, OSError, OverflowError, ValueError) as error:  # also for a value that SQLite can't hold
        raise UsageError(f"{path}: the history can't be used: {error}; move it away, or name another") from error


def rows_of(path: Path, table: str, *columns: str) -> list[tuple[str, ...]]:
    """The rows of a table of the history at `path`, in order of time. Empty if there is no file. Changes nothing.
    Raises UsageError if the file can't be used."""
    if not os.path.lexists(path):
        return []
    try:
        _check(path)
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_WAIT_S)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            if tables and database.execute("PRAGMA application_id").fetchone()[0] != _OURS:
                raise OSError(_NOT_OURS)
            with suppress(OSError):  # on a file system that is read-only
                os.chmod(path, 0o600)
            if table not in tables:
                return []
            names = ", ".join(f'"{name}"' for name in columns)
            return database.execute(f"SELECT {names} FROM {table} ORDER BY started, rowid").fetchall()
    except (sqlite3.Error, OSError, ValueError) as error:
        raise UsageError(f"{path}: the history can't be used: {error}; move it away, or name another") from error


def each_in(out: Path, file: str, read: Callable[[Path], Entry]) -> Iterator[Entry]:
    """The results of `read` for each folder directly below `out` that has the file. Folders that can't be read are left
    out."""
    for path in sorted(out.absolute().glob(f"*/{file}")):
        with suppress(UsageError):
            yield read(path.parent)


def _claim(path: Path) -> None:
    """Creates the file, or checks that it belongs to this user. An existing file is never opened here: closing it would
    release the locks that SQLite holds on it in another thread."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    _check(path)


def _check(path: Path) -> None:
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise OSError("it is a link")
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError("it is not a file of yours")


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    if database.execute("PRAGMA application_id").fetchone()[0] != _OURS:
        if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise OSError(_NOT_OURS)
        database.execute(f"PRAGMA application_id = {_OURS}")
    for statement in _TABLES:
        database.execute(statement)
    os.chmod(path, 0o600)


@dataclass(frozen=True)
class Kept:
    """One run in the history. `commit`: the commit of the job's working directory, with `-dirty` if it had uncommitted
    changes; empty if there is none."""

    result: Result
    commit: str

    @property
    def caught_up_s(self) -> float | None:
        """The seconds until the slowest recovery had caught up. None if a recovery never did, or if there was none."""
        times = [recovery.parts.get("caught_up") for recovery in self.result.recoveries]
        return None if None in times else max((time for time in times if time is not None), default=None)

    @property
    def lost_steps(self) -> int | None:
        """The lost steps of all recoveries together. None if a number is not known."""
        lost = [recovery.lost_steps for recovery in self.result.recoveries]
        return (
            None
            if None in lost or not lost
            else sum(one.lost_steps or 0 for one in each_restart(self.result.recoveries))
        )

    def part_s(self, part: str) -> float | None:
        """The longest time, in seconds, from a fault until this part of its recovery was over. None if it was not
        seen."""
        return max(
            (at for recovery in self.result.recoveries if (at := recovery.parts.get(part)) is not None), default=None
        )


def add_runs(path: Path, runs: Sequence[Kept]) -> None:
    """Adds runs to the history at `path`. Replaces a run that is already there, because it was judged again. Raises
    UsageError if the file can't be used."""
    rows = (
        (one.run_dir, one.scenario, one.seed, one.started, kept.commit, one.verdict.value, json.dumps(one.to_json()))
        for kept in runs
        for one in (kept.result,)
    )
    add_rows(path, "runs", rows)


def kept(path: Path, scenarios: Sequence[str] = (), commit: str = "", beside: Sequence[Kept] = ()) -> list[Kept]:
    """The runs of the history at `path`, in order of time. `scenarios`: those to include; empty: all. `commit`: the
    beginning of the wanted commits. `beside`: runs to add if the file lacks them. Leaves out results that can't be
    read, such as those of a later version. Changes no file. Raises UsageError if the file can't be used."""
    found: dict[tuple[str, str, int, str], Kept] = {}
    for one in (*(run for row in rows_of(path, "runs", "commit", "result") for run in _read(*row)), *beside):
        if _identity(one.result) not in found or Path(one.result.run_dir).is_absolute():
            found[_identity(one.result)] = one
    wanted = (one for one in found.values() if not scenarios or one.result.scenario in scenarios)
    return sorted((one for one in wanted if one.commit.startswith(commit)), key=lambda one: one.result.started)


def _identity(result: Result) -> tuple[str, str, int, str]:
    """The identity of a run. It does not depend on the path of its directory."""
    return Path(result.run_dir).name, result.scenario, result.seed, result.started


def kept_of(folder: RunDir) -> Kept:
    """The run in a run directory. Raises UsageError if it has no readable result."""
    try:
        result = result_in(folder)
    except (OSError, UsageError) as error:
        raise UsageError(f"{folder.root}: no result in it: {error}; `torchaos judge` shows its outcome") from error
    return Kept(
        replace(result, run_dir=str(folder.root.absolute())), commit_in(folder)
    )  # the folder may have been moved


def found_in(out: Path) -> list[Kept]:
    """Every finished run in the folders directly below `out`, in order of time."""
    found = each_in(out, "result.json", lambda path: kept_of(RunDir(path)))
    return sorted(found, key=lambda one: one.result.started)


def in_file(path: Path) -> list[Kept]:
    """The results in a `--json` file. Raises UsageError if it is not such a file."""
    try:
        results = results_in(path)
    except (OSError, UsageError) as error:
        raise UsageError(f"{path}: not a file of results, as `torchaos run --json` writes: {error}") from error
    return [Kept(result, commit_in(RunDir(Path(result.run_dir)))) for result in results]


def _read(commit: str, raw: str) -> Iterator[Kept]:
    try:
        yield Kept(Result.from_json(json.loads(raw)), commit)
    except (UsageError, ValueError):
        return
