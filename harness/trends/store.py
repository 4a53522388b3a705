"""The results of many runs in one SQLite file beside the folder of their run directories, so that trends outlive them.

One row per run; `result` holds the whole of result.json, the other columns are there to be asked for. What is pruned
from the disk stays here. The file is readable by its owner alone.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchaos.harness.contracts import UsageError
from torchaos.harness.result import Result
from torchaos.harness.rundir import RunDir

_WAIT_S = 5.0  # for another process that writes
_OURS = 0x746F7263  # "torc": in the file's header, see PRAGMA application_id
_TABLES = (
    """CREATE TABLE runs (
    run_dir TEXT PRIMARY KEY, scenario TEXT NOT NULL, seed INTEGER NOT NULL, started TEXT NOT NULL,
    "commit" TEXT NOT NULL, verdict TEXT NOT NULL, result TEXT NOT NULL
)""",
    "CREATE INDEX by_scenario ON runs (scenario, started)",
)


@dataclass(frozen=True)
class Kept:
    """One run. `commit`: of the job's working directory, with `-dirty` where it was; empty where there is none."""

    result: Result
    commit: str

    @property
    def caught_up_s(self) -> float | None:
        """Seconds until the slowest recovery had caught up; None where one never did, or there was none."""
        times = [one.parts.get("caught_up") for one in self.result.recoveries]
        return None if None in times else max((one for one in times if one is not None), default=None)

    @property
    def lost_steps(self) -> int | None:
        """Of all recoveries together; None where one is not known."""
        lost = [one.lost_steps for one in self.result.recoveries]
        return None if None in lost or not lost else sum(one for one in lost if one is not None)

    def part_s(self, part: str) -> float | None:
        """The longest that a part of the recovery was over after, in seconds since the fault; None: not seen."""
        return max((at for one in self.result.recoveries if (at := one.parts.get(part)) is not None), default=None)


def path_of(out: Path) -> Path:
    """The history of the runs whose directories are in `out`: beside it, where nothing that lists `out` meets it."""
    whole = out.absolute()
    return whole.with_name(f"{whole.name}.sqlite") if whole.name else whole / "torchaos-runs.sqlite"


class Store:
    """Raises UsageError where the file can't be used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kept: Sequence[Kept]) -> None:
        """A run that is there already is replaced: it was judged again."""
        with self._open() as database:
            database.executemany(
                'INSERT OR REPLACE INTO runs (run_dir, scenario, seed, started, "commit", verdict, result) '
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (one.result.run_dir, one.result.scenario, one.result.seed, one.result.started, one.commit,
                     one.result.verdict.value, json.dumps(one.result.to_json()))
                    for one in kept
                ],
            )  # fmt: skip

    def runs(self, scenarios: Sequence[str] = (), commit: str = "") -> list[Kept]:
        """In order of time; of these scenarios, or of all, and of a commit that begins like this. Results that can't be
        read any more, of a later version for one, are passed over."""
        if not self.path.is_file():
            return []
        with self._open() as database:
            rows = database.execute(
                'SELECT scenario, "commit", result FROM runs WHERE "commit" LIKE ? ORDER BY started, rowid',
                (commit.replace("%", "") + "%",),
            ).fetchall()
        return [kept for name, at, raw in rows if not scenarios or name in scenarios for kept in _read(at, raw)]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self._claim()
            with closing(sqlite3.connect(self.path, timeout=_WAIT_S)) as database, database:
                database.execute("BEGIN IMMEDIATE")
                self._prepare(database)
                yield database
        except (sqlite3.Error, OSError, OverflowError, ValueError) as error:  # also what SQLite can't hold
            raise UsageError(
                f"{self.path}: the history can't be used: {error}; move it away, or name another"
            ) from error

    def _claim(self) -> None:
        """Make the file, or see that it is this user's own. One that is there is never opened here: closing it would
        release the locks that SQLite holds on it in another thread."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        found = os.lstat(self.path)
        if stat.S_ISLNK(found.st_mode):
            raise OSError("it is a link")
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError("it is not a file of yours")

    def _prepare(self, database: sqlite3.Connection) -> None:
        if database.execute("PRAGMA application_id").fetchone()[0] != _OURS:
            if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise OSError("it is a database, and not a history of runs")
            for statement in (f"PRAGMA application_id = {_OURS}", *_TABLES):
                database.execute(statement)
        os.chmod(self.path, 0o600)


def kept_of(folder: RunDir) -> Kept:
    """What a run directory says of its run. Raises UsageError where it has no result that can be read."""
    try:
        result = Result.from_json(json.loads(folder.result.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{folder.root}: no result in it: {error}; `torchaos judge` says what became of it") from error
    return Kept(replace(result, run_dir=str(folder.root)), _commit_in(folder))  # it may have been moved


def found_in(out: Path) -> list[Kept]:
    """Every finished run directly below a folder, in order of time."""
    found = []
    for path in sorted(out.glob("*/result.json")):
        try:
            found.append(kept_of(RunDir(path.parent)))
        except UsageError:
            continue
    return sorted(found, key=lambda one: one.result.started)


def in_file(path: Path) -> list[Kept]:
    """The results of a `--json` file. Raises UsageError where it is none."""
    try:
        raw: Any = json.loads(path.read_text())
        results = [Result.from_json(one) for one in raw["results"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: not a file of results, as `torchaos run --json` writes: {error}") from error
    return [Kept(one, _commit_in(RunDir(Path(one.run_dir)))) for one in results]


def _commit_in(folder: RunDir) -> str:
    try:
        found = json.loads((folder.artifacts / "environment.json").read_text())
        return str(found.get("commit") or "") if isinstance(found, dict) else ""
    except (OSError, ValueError, RecursionError):
        return ""


def _read(commit: str, raw: str) -> Iterator[Kept]:
    try:
        yield Kept(Result.from_json(json.loads(raw)), commit)
    except (UsageError, ValueError):
        return
