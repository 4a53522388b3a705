"""The results of many runs in one SQLite file beside the folder of their run directories. Runs that were removed from
the disk stay in the file. One row for each run: `result` holds the whole result.json; the other columns are for
queries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchaos.harness.contracts import UsageError
from torchaos.harness.record.finished import commit_in, result_in, results_in
from torchaos.harness.record.result import Result, each_restart
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.telling.trends import database


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
        """The longest time in seconds from a fault until this part of the recovery was over. None if it was not
        seen."""
        return max(
            (at for recovery in self.result.recoveries if (at := recovery.parts.get(part)) is not None), default=None
        )


def add(path: Path, runs: Sequence[Kept]) -> None:
    """Adds runs to the history at `path`. A run that is already there is replaced, because it was judged again. Raises
    UsageError."""
    rows = (
        (one.run_dir, one.scenario, one.seed, one.started, kept.commit, one.verdict.value, json.dumps(one.to_json()))
        for kept in runs
        for one in (kept.result,)
    )
    database.add(path, "runs", rows)


def kept(path: Path, scenarios: Sequence[str] = (), commit: str = "", beside: Sequence[Kept] = ()) -> list[Kept]:
    """The runs of the history at `path`, in order of time. `scenarios`: only these (none: all). Only runs whose commit
    begins with the given text. `beside`: runs that are added if the file lacks them. Results that can't be read, such
    as those of a later version, are left out. Changes nothing. Raises UsageError."""
    found: dict[tuple[str, str, int, str], Kept] = {}
    for one in (*(run for row in database.rows_of(path, "runs", "commit", "result") for run in _read(*row)), *beside):
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
    """Every finished run directly below a folder, in order of time."""
    found = database.each_in(out, "result.json", lambda path: kept_of(RunDir(path)))
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
