"""The results of many runs in one SQLite file beside the folder of their run directories, so that trends outlive them.

One row per run; `result` holds the whole of result.json, the other columns are there to be asked for. What is pruned
from the disk stays here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchaos.harness.contracts import UsageError
from torchaos.harness.record.finished import commit_in, result_in, results_in
from torchaos.harness.record.result import Result
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.telling.trends import database


@dataclass(frozen=True)
class Kept:
    """One run. `commit`: of the job's working directory, with `-dirty` where it was; empty if there is none."""

    result: Result
    commit: str

    @property
    def caught_up_s(self) -> float | None:
        """Seconds until the slowest recovery had caught up; None if one never did, or there was none."""
        times = [one.parts.get("caught_up") for one in self.result.recoveries]
        return None if None in times else max((one for one in times if one is not None), default=None)

    @property
    def lost_steps(self) -> int | None:
        """Of all recoveries together; None if one is not known."""
        lost = [one.lost_steps for one in self.result.recoveries]
        return None if None in lost or not lost else sum(one for one in lost if one is not None)

    def part_s(self, part: str) -> float | None:
        """The longest that a part of the recovery was over after, in seconds since the fault; None: not seen."""
        return max((at for one in self.result.recoveries if (at := one.parts.get(part)) is not None), default=None)


def add(path: Path, runs: Sequence[Kept]) -> None:
    """Into the history at `path`. A run that is there already is replaced: it was judged again. Raises UsageError."""
    rows = (
        (one.run_dir, one.scenario, one.seed, one.started, kept.commit, one.verdict.value, json.dumps(one.to_json()))
        for kept in runs
        for one in (kept.result,)
    )
    database.add(path, "runs", rows)


def kept(path: Path, scenarios: Sequence[str] = (), commit: str = "", beside: Sequence[Kept] = ()) -> list[Kept]:
    """Of the history at `path`, in order of time: runs of these scenarios (none: of all) and of a commit that begins
    like this. `beside`: runs that are shown too, whether they are in the file or not. Each run is there once. Results
    that can't be read, such as those of a later version, are left out. Changes nothing. Raises UsageError."""
    found: dict[tuple[str, str, int, str], Kept] = {}
    for one in (*(run for row in database.rows_of(path, "runs", "commit", "result") for run in _read(*row)), *beside):
        if _which(one.result) not in found or Path(one.result.run_dir).is_absolute():
            found[_which(one.result)] = one
    wanted = (one for one in found.values() if not scenarios or one.result.scenario in scenarios)
    return sorted((one for one in wanted if one.commit.startswith(commit)), key=lambda one: one.result.started)


def _which(result: Result) -> tuple[str, str, int, str]:
    """What a run is known by, wherever its directory was moved and by whichever path it was seen."""
    return Path(result.run_dir).name, result.scenario, result.seed, result.started


def kept_of(folder: RunDir) -> Kept:
    """What a run directory says of its run. Raises UsageError if it has no result that can be read."""
    try:
        result = result_in(folder)
    except (OSError, UsageError) as error:
        raise UsageError(f"{folder.root}: no result in it: {error}; `torchaos judge` says what became of it") from error
    return Kept(replace(result, run_dir=str(folder.root.absolute())), commit_in(folder))  # it may have been moved


def found_in(out: Path) -> list[Kept]:
    """Every finished run directly below a folder, in order of time."""
    found = database.each_in(out, "result.json", lambda path: kept_of(RunDir(path)))
    return sorted(found, key=lambda one: one.result.started)


def in_file(path: Path) -> list[Kept]:
    """The results of a `--json` file. Raises UsageError if it is none."""
    try:
        results = results_in(path)
    except (OSError, UsageError) as error:
        raise UsageError(f"{path}: not a file of results, as `torchaos run --json` writes: {error}") from error
    return [Kept(one, commit_in(RunDir(Path(one.run_dir)))) for one in results]


def _read(commit: str, raw: str) -> Iterator[Kept]:
    try:
        yield Kept(Result.from_json(json.loads(raw)), commit)
    except (UsageError, ValueError):
        return
