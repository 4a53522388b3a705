"""Finds run directories, at any depth in a folder of artifacts, and decides which of them count for a gate.

A run counts if all of these fit: the scenario text, the options of the gate (`set`), the job's sources (as they are
now, or at the wanted commit), the wanted versions, and the age. Of the runs that count, the newest of each seed is
judged. If it is not known whether something fits, the run counts, but the gate stays closed."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.record.plan import Plan, counted, seconds_in_words
from torchaos.harness.record.result import Result
from torchaos.harness.record.rundir import RunDir, commit_in, explored_in, result_in
from torchaos.harness.release.gate_file import Wanted
from torchaos.harness.running.planner.job_plan import folder_of
from torchaos.harness.running.twin import made_of
from torchaos.harness.running.twin_key import digest, sources_of
from torchaos.harness.scenario.grammar import Job

_CONFIGURATION = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".py")


class Unknown(Exception):
    """It is not known whether the sources have changed. The text is a clause with the reason."""


def changed_since(run: RunDir, job: Job, file: Path) -> str:
    """A clause about the first source of the job that has changed since the run. Empty if none has changed. Raises
    Unknown.

    Sources are the files that are part of a twin's key (running/twin_key.py), and the configuration files that the job
    read in the twin of the run. Their paths are relative to the job's working directory, so the run may be from another
    checkout or machine. `job`: the job of the scenario in `file`."""
    try:
        cwd = folder_of(job, file)
        plan = Plan.read(run.plan)
    except (OSError, ValueError, UsageError) as error:
        raise Unknown(f"the job can't be read: {error}") from error
    then = {**_read_by_the_twin(run, Path(plan.job.cwd)), **_recorded(run)}
    there = {name: digest(cwd / name) for name in then if (cwd / name).is_file()}
    if not there:
        raise Unknown(f"none of its files is in {cwd}")
    for name, was in then.items():
        if name not in there and name.startswith(os.pardir):
            raise Unknown(f"{cwd / name} is not here")
        if there.get(name) != was:
            return f"{name} {'has changed' if name in there else 'is gone'}"
    now = sources_of(replace(plan, job=replace(plan.job, cwd=str(cwd))))
    new = next((name for name in now if name not in then and not name.startswith(os.pardir)), None)
    return f"{new} is new" if new else ""


def _recorded(run: RunDir) -> Mapping[str, str]:
    """The digests that the run recorded, by path."""
    try:
        found = json.loads((run.artifacts / "sources.json").read_text())
        files = {str(name): str(was) for name, was in found["files"].items()}
        unknown = str(found["unknown"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unknown("the run did not record it") from error
    if unknown or not files:
        raise Unknown(unknown or "no source of the job is known")
    return files


def _read_by_the_twin(run: RunDir, cwd: Path) -> Mapping[str, str]:
    """The digests of the sources and configuration files that the twin's job read below its working directory."""
    made = made_of(run.twins / "0")
    found = {
        os.path.relpath(path, cwd): was for path, (_, _, was) in (made.files if made else {}).items()
        if was and path.endswith(_CONFIGURATION)
    }  # fmt: skip
    return {name: was for name, was in found.items() if not name.startswith(os.pardir)}


SKEW = timedelta(minutes=5)  # the largest accepted difference between the clocks of two machines


@dataclass(frozen=True)
class Terms:
    """The conditions under which a run counts."""

    now: datetime
    max_age: timedelta
    commit: str = ""
    versions: Mapping[str, str] | None = None
    set: Sequence[str] = ()


@dataclass(frozen=True)
class Found:
    """A run directory, or the directory of an exploration (`explored`). `result`: its stored result; None if it can't
    be read, with the reason in `problem`."""

    folder: RunDir
    text: bytes
    result: Result | None
    problem: str
    commit: str
    explored: bool

    @property
    def recorded(self) -> RunDir:
        """The run directory with the record. For an exploration: the directory of the recorded run."""
        return RunDir(self.folder.root / "recorded") if self.explored else self.folder

    @cached_property
    def known_result(self) -> Result | None:
        """The stored result of the run or, if there is none, the result of judging the record again. None if the record
        can't be judged."""
        if self.result is not None or self.explored:
            return self.result
        try:
            return judge(self.folder)
        except (ChaosError, OSError):
            return None

    @property
    def started(self) -> datetime | None:
        try:
            found = datetime.fromisoformat(self.known_result.started) if self.known_result else None
        except ValueError:
            return None
        return found if found and found.tzinfo else None

    def version(self, name: str) -> str:
        return self.known_result.versions.get(name, "") if self.known_result else ""

    @property
    def options(self) -> tuple[str, ...] | None:
        """The options on its command line that change the run: `--set` with its value, `--attach`. None if they are not
        known."""
        try:
            words = shlex.split(self.known_result.reproduce) if self.known_result else []
        except ValueError:
            return None
        pairs = zip(words, [*words[1:], ""], strict=False)
        options = tuple(value if word == "--set" else word for word, value in pairs if word in ("--set", "--attach"))
        return options if words else None


def found_in(folders: Sequence[Path]) -> list[Found]:
    """The runs in the folders. A folder that does not exist contains no runs. Raises UsageError if a folder can't be
    listed."""
    there = [folder.absolute() for folder in folders if folder.exists()]
    return [_found(path) for folder in there for path in _run_dirs(folder)]


def _run_dirs(folder: Path) -> Iterator[Path]:
    """The folders that contain a plan or a result. Folders inside a run directory, such as the twins, are left out."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UsageError(f"{folder}: it can't be listed: {error.strerror}; name the folder of the runs") from error
    if {"plan.json", "result.json"} & set(names):
        yield folder
        return
    for name in names:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            yield from _run_dirs(folder / name)


def _found(path: Path) -> Found:
    folder = RunDir(path)
    try:
        text = folder.scenario.read_bytes()
    except OSError:
        text = b""
    result, problem, explored = None, "", (path / "recording").is_dir()
    try:
        result = explored_in(path) if explored else result_in(folder)
    except OSError as error:
        problem = f"it has no result: {error.strerror}; the run was not finished"
    except UsageError as error:
        problem = f"its result.json can't be read: {' '.join(str(error).split())[:200]}"
    return Found(folder, text, result, problem, commit_in(RunDir(path / "recorded") if explored else folder), explored)


def counting(wanted: Wanted, runs: Sequence[Found], terms: Terms) -> tuple[list[Found], str]:
    """The runs to judge, the newest of each seed; or the reason if there are none."""
    runs = [one for one in runs if one.explored == wanted.explored]
    same = [one for one in runs if one.text == wanted.text]
    dropped = [(one, why_not(one, wanted, terms)) for one in same]
    found = [one for one, why in dropped if not why]
    if found:
        return _newest(found), ""
    if dropped:
        one, why = max(dropped, key=lambda pair: pair[0].started or terms.now)
        return [], f"no run of it counts: the newest {why}; run it again ({one.folder.root})"
    others = [
        one for one in runs if one.known_result is not None and one.known_result.scenario == wanted.scenario.scenario
    ]
    if others:
        return [], (
            f"it has {counted(len(others), 'run')}, but none was made from this text of "
            f"{wanted.path.name}; run it again"
        )
    return [], f"there is no run of it; do `torchaos {'explore' if wanted.explored else 'run'} {wanted.path}`"


def why_not(run: Found, wanted: Wanted, terms: Terms) -> str:
    """Why the run does not count, as a clause that follows `the run`. Empty if it counts."""
    if run.options is not None and sorted(run.options) != sorted(terms.set):
        options = " ".join(shlex.quote(option) for option in run.options) or "nothing"
        return f"was run with other options than the gate's `set` ({options})"
    if terms.commit and run.commit and not _at(run.commit, terms.commit):
        return f"was made at commit {run.commit}, not {terms.commit}"
    for name, pattern in (terms.versions or {}).items():
        if (version := run.version(name)) and not fnmatchcase(version, pattern):
            return f"was made with {name} {version}, not {pattern}"
    if run.started is not None and terms.now - run.started > terms.max_age:
        return f"is stale: it began {_long(terms.now - run.started)} ago, and {_long(terms.max_age)} are allowed"
    with suppress(Unknown):  # not known: `doubt` says so
        if changed := "" if terms.commit else changed_since(run.recorded, wanted.scenario.job, wanted.path):
            return f"was made with other code of the job: {changed}"
    return ""


def doubt(run: Found, wanted: Wanted, terms: Terms) -> str:
    """Why a run that counts keeps the gate closed, whatever its verdict: something about it is not known. Empty if all
    is known."""
    if run.result is None:
        return f"{run.problem}; run it again"
    if run.started is None:
        return "its start time is not known; run it again"
    if run.started - terms.now > SKEW:
        return f"by its clock it begins {_long(run.started - terms.now)} from now; set the clocks, and run it again"
    if run.options is None:
        return "its command line is not known; run it again"
    if terms.commit and not run.commit:
        told = "its commit is not known: the job's working directory was in no git repository"
        return f"{told}; leave out --commit, and the job's files are compared"
    if unknown := [name for name in terms.versions or {} if not run.version(name)]:
        return f"its version of {unknown[0]} is not known; run it again"
    try:
        if not terms.commit:
            changed_since(run.recorded, wanted.scenario.job, wanted.path)
    except Unknown as why:
        told = f"the job's code is not known to be that of the run: {why}"
        return f"{told}; let job.cwd of {wanted.path.name} be the job's folder, or give --commit"
    return ""


def _long(time: timedelta) -> str:
    seconds = time.total_seconds()
    for unit, size in (("days", 86400.0), ("hours", 3600.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return seconds_in_words(seconds)


def _at(commit: str, wanted: str) -> bool:
    """Whether the commit begins with `wanted`. False if it had uncommitted changes (`-dirty`)."""
    return commit.startswith(wanted) and not commit.endswith("-dirty")


def _newest(runs: Sequence[Found]) -> list[Found]:
    """The newest run of each seed. Runs whose seed or time is not known are all kept."""
    oldest = datetime.min.replace(tzinfo=timezone.utc)
    by_seed: dict[object, Found] = {}
    for run in sorted(runs, key=lambda one: one.started or oldest):
        known = run.known_result is not None and run.started is not None
        by_seed[run.known_result.seed if run.known_result and known else run.folder.root] = run
    return list(by_seed.values())
