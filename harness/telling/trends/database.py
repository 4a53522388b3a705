"""The SQLite file of a history. It is readable only by its owner, and shared by processes."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

from torchaos.harness.contracts import UsageError

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


def add(path: Path, table: str, rows: Iterable[tuple[object, ...]]) -> None:
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
    """The results of `read` for each folder directly below `out` that has the file and can be read."""
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
