"""Replaces the job of a scenario by the job of a second file, or by a command line."""

from __future__ import annotations

import shlex
from collections.abc import Container, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

from torchaos.harness import registry
from torchaos.harness.interfaces import UsageError
from torchaos.harness.registry import ready
from torchaos.harness.scenario.values import fill_some
from torchaos.harness.scenario.yaml_source import Keys, Place, Problem, ScenarioError, Source, dumped, raw, read

T = TypeVar("T")
COMMAND_LINE = Path("the command line")
_KEPT = ("resubmit",)  # the scheduler's reaction to a death belongs to the experiment, not to the job


def job_in(file: Path) -> Source:
    """The job of a file, which is a scenario or holds only a job. Raises UsageError if it has none."""
    source = read(file)
    if not isinstance(source.data.get("job"), dict):
        problem = "there is no job here; write `job:`, and below it `command:` with your torchrun command line"
        raise ScenarioError(file, [Problem(source.place(("job",)), problem)])
    return source


def job_of(command: Sequence[str]) -> Source:
    """The job that a command line starts in the current folder. If the command line names a single folder below {run},
    this folder becomes the folder of the job's checkpoints."""
    job: dict[str, object] = {"command": shlex.join(command)}  # one text, because secrets are masked in texts
    if folder := checkpoints_in(command):
        job["checkpoints"] = {"path": folder}
    return Source(COMMAND_LINE, {"job": job}, {("job",): Place(0, 0)})


def other_job(file: Path | None, command: Sequence[str], attach: int | None) -> Source | None:
    """The job of the user, by its command, file or process; None if the scenario's own job is used. Raises UsageError
    if it is given twice."""
    if sum((file is not None, bool(command), attach is not None)) > 1:
        raise UsageError("the job is given twice; write --job FILE, --attach PID or -- COMMAND")
    return job_in(file) if file else job_of(command) if command else None


def checkpoints_in(command: Sequence[str]) -> str | None:
    """The path below {run} that a command line names. None if it names no such path, or several."""
    found = {word.partition("=")[2] if word.startswith("-") else word for word in command if "{run}" in word}
    return next(iter(found)) if len(found) == 1 else None


def with_job(source: Source, other: Source) -> Source:
    """The scenario with the other job. Raises ScenarioError for a ready scenario that only works with its own job."""
    own = source.data.get("job")
    if not isinstance(own, dict):
        own = {}
    if source.path.is_relative_to(ready.folder()) and not _is_plain(own.get("command")):
        problem = "this scenario needs its own job, which starts more than torchrun; write your job into a copy"
        raise ScenarioError(source.path, [Problem(source.place(("job", "command")), problem)])
    kept = {name: own[name] for name in _KEPT if name in own}
    data = {**source.data, "job": {**kept, **other.data["job"]}}
    values, keys = (
        _merged(getattr(source, kind), {at: replace(place, file=str(other.path)) for at, place in theirs.items()}, kept)
        for kind, theirs in (("values", other.values), ("keys", other.keys))
    )
    return Source(source.path, data, values, keys, _merged(source.texts, other.texts, kept))


def text_of(file: Path, job: Source | None) -> bytes:
    """The scenario for the run directory: the unchanged file, or the scenario with the other job in it. Raises
    UsageError if it can't be read."""
    if job is None:
        return raw(file)
    data = with_job(read(file), job).data
    rest = {key: _filled(value, file.parent.absolute()) for key, value in data.items() if key != "job"}
    return dumped({**rest, "job": _settled(data, job.path.parent)}).encode()


def _settled(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The job of a scenario, with absolute paths in place of those that are relative to its file, so that it can be
    written to a file elsewhere. `folder`: the folder of its file. It may be run by each launcher whose settings it
    has."""
    folder = folder.absolute()
    launchers: list[Any] = [registry.find("launchers", name) for name in registry.names("launchers")]
    used: list[Any] = [
        one
        for one in launchers
        if is_dataclass(one) and not data["job"].keys().isdisjoint(each.name for each in fields(one))
    ]
    used = used or [registry.find("launchers", data.get("launcher", "local"))]
    found: dict[str, Any] = _filled(dict(data["job"]), folder)
    if "cwd" in found or not any(one.own_folders for one in used):
        found["cwd"] = _in(folder, str(found.get("cwd", ".")))
    for one in used:
        one.settle(found, partial(_in, folder))
    return found


def settled_scenario(data: Mapping[str, Any], planned_cwd: str) -> dict[str, Any]:
    """A scenario of a run directory, with absolute paths in place of relative ones: its file was in another folder when
    it was run. `planned_cwd`: the job's working directory in the plan, which shows that folder. Raises ValueError if
    the folder is needed and can't be known."""
    cwd, folder = str(data["job"].get("cwd", ".")), Path(planned_cwd)
    cwd = "." if cwd == "{here}" else cwd.removeprefix("{here}/")
    is_known = not cwd.startswith(("/", "{"))
    for _ in PurePath(cwd).parts if is_known else ():
        folder = folder.parent
    found = {key: _filled(value, folder) for key, value in data.items()} | {"job": _settled(data, folder)}
    if not is_known and found != data:
        raise ValueError("it names files relative to its own folder, which is not known; run the file again")
    return found


def _filled(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, folder) for item in value]
    return fill_some(value, {"here": str(folder)}) if isinstance(value, str) else value


def _in(folder: Path, path: str) -> str:
    """The path, absolute unless it begins with a placeholder."""
    return path if path.startswith(("/", "{")) else str(folder / path)


def _merged(mine: Mapping[Keys, T], theirs: Mapping[Keys, T], kept: Container[object]) -> dict[Keys, T]:
    own = {keys: one for keys, one in mine.items() if keys[:1] != ("job",) or (len(keys) > 1 and keys[1] in kept)}
    return own | {keys: one for keys, one in theirs.items() if keys[:1] == ("job",)}


def _is_plain(command: object) -> bool:
    return isinstance(command, str) and shlex.split(command)[0] == "torchrun"
