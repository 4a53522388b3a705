"""Loads scenarios: all mistakes in a file are reported at once, each with its place and advice. Replaces the job of a
scenario by the job of a second file, or by a command line. Also tells what a YAML file is: a scenario, a game day, a
gate, or none of our files. A folder may hold all of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from torchaos.harness import registry
from torchaos.harness.interfaces import UsageError
from torchaos.harness.scenario.checks import Tell, check, with_settings
from torchaos.harness.scenario.field_types import fill_all
from torchaos.harness.scenario.grammar import Job, Scenario
from torchaos.harness.scenario.validation_errors import Rest, in_file, most_telling, words
from torchaos.harness.scenario.yaml_source import (
    Keys,
    Place,
    Problem,
    ScenarioError,
    Source,
    dumped,
    raw,
    read,
    value_of,
)

KINDS = ("scenario", "gameday", "gate")  # each is the key of its name
IN_WORDS = {"scenario": "scenario", "gameday": "game day", "gate": "gate"}
_PARTS = {  # keys that a file without its name has
    "scenario": {"job", "assert", "faults"}, "gameday": {"job", "faults", "duration", "arrivals", "preset", "score"},
    "gate": {"scenarios", "explored", "max_age", "environments", "waivers"},
}  # fmt: skip
_KEY = re.compile(rb"""(?:^|\r)(?:\xef\xbb\xbf)?["']?(scenario|gameday|gate)["']?\s*:""", re.MULTILINE)


def kind_of(file: Path) -> str:
    """The kind of the file; empty if it is none of ours. A file with mistakes has a kind, too. Raises UsageError if it
    can't be read."""
    try:
        data = read(file).data
    except UsageError:
        try:
            found = _KEY.search(file.read_bytes())
        except OSError as error:
            raise UsageError(f"{file}: it can't be read: {error.strerror}") from error
        return found[1].decode() if found else ""
    return kind_in(data)


def kind_in(data: Mapping[str, Any]) -> str:
    """The kind of a file with these keys. Empty if it is none of ours."""
    most = max(KINDS, key=lambda kind: (kind in data, len(_PARTS[kind] & data.keys())))
    return most if most in data or len(_PARTS[most] & data.keys()) > 1 else ""


def files_in(paths: Sequence[Path], kinds: Collection[str] = KINDS) -> list[Path]:
    """The files among `paths`. A folder stands for its files of these kinds. Raises UsageError if a folder has none."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(one for one in path.iterdir() if one.suffix in (".yaml", ".yml"))
        own = [one for one in inside if kind_of(one) in kinds]
        if not own:
            named = " or ".join(IN_WORDS[kind] for kind in kinds)
            raise UsageError(f"{path}: it holds no {named} (*.yaml); give a file, or another folder")
        found += own
    return found


Model = TypeVar("Model", bound=BaseModel)


def load(path: Path, overrides: Sequence[str] = (), job: Source | None = None) -> Scenario:
    """Loads a scenario file. `overrides`: texts `KEY=VALUE` that replace values; `job`: where the job comes from, if
    not from this file. Raises ScenarioError with a line for each mistake: `file:line:column: what is wrong; what to
    do`."""
    return load_as(Scenario, path, overrides, check, job)


def load_as(
    model: type[Model], path: Path, overrides: Sequence[str], check: Callable[[Model, Tell], None],
    job: Source | None = None,
) -> Model:  # fmt: skip
    """Loads a file as another type, such as a game day. `model`: the type; `check` reports mistakes between its parts.
    Raises ScenarioError with a line for each mistake, as `load` does."""
    source = read(path)
    _check_kind(model, source)
    source = with_job(source, job) if job else source
    overridden = [override(source, text) for text in overrides]
    if isinstance(job_data := source.data.get("job"), dict) and job_data.keys() - Job.model_fields.keys():
        model = with_settings(model)  # only for these, because it loads all launchers
    while True:
        found, mistakes = _judged(model, source, overridden, check)
        if not source.take_as_text(mistakes.want_text):
            break
    if mistakes.problems or mistakes.elsewhere or found is None:
        raise ScenarioError(path, mistakes.problems, mistakes.elsewhere)
    return found


@dataclass
class _Mistakes:
    """The mistakes in a file. An instance is the `tell` of the checks."""

    source: Source
    overridden: Sequence[Keys]
    rest: Rest | None = None  # the checks see only the rest, if the file itself has mistakes
    problems: list[Problem] = field(default_factory=list)
    want_text: list[Keys] = field(default_factory=list)  # places of numbers where text is wanted
    elsewhere: list[str] = field(default_factory=list)  # lines about other files

    def __call__(
        self, keys: Keys, text: str, key: bool = False, also: Iterable[Keys] = (), texts: Iterable[Keys] = ()
    ) -> None:  # fmt: skip
        if self.rest and self.rest.lacks([keys, *also]):
            return
        self.want_text += texts
        override = next((".".join(map(str, at)) for at in self.overridden if keys[: len(at)] == at), None)
        place = self.source.place(keys, key)
        self.problems.append(Problem(place, f"--set {override}: {text}" if override else text))


def _judged(
    model: type[Model], source: Source, overridden: Sequence[Keys], check: Callable[[Model, Tell], None]
) -> tuple[Model | None, _Mistakes]:
    """The typed file, and its mistakes. If some values have the wrong type, the rest of the file is checked too."""
    tell = _Mistakes(source, overridden)
    found: Model | None = None
    try:
        found = whole = model.model_validate(source.data)
    except ValidationError as error:
        for keys, one in most_telling(source, error, model).items():
            tell(keys, words(one, keys, model), key=one["type"] == "extra_forbidden")
        tell.want_text += [in_file(source, one) for one in error.errors() if one["type"] == "string_type"]
        tell.rest = Rest(source, model)
        whole = tell.rest.without(error)
    if whole is not None:
        try:
            check(whole, tell)
        except UsageError as others:
            tell.elsewhere += str(others).splitlines()
    return found, tell


_COMMANDS = {
    "scenario": "`torchaos run FILE`", "gameday": "`torchaos gameday FILE`, or with --plan to see only its plan",
    "gate": "`torchaos gate FILE`",
}  # fmt: skip


def _check_kind(model: type[BaseModel], source: Source) -> None:
    """Raises ScenarioError if the file is of another kind: then nothing else is reported."""
    own, kind = next(name for name in KINDS if name in model.model_fields), kind_in(source.data)
    if not kind:
        text = f"this is no {IN_WORDS[own]}: it has no key {own!r}; give another file"
        raise ScenarioError(source.path, [Problem(Place(1, 1), text)])
    if kind != own:
        text = f"this is a {IN_WORDS[kind]}; use {_COMMANDS[kind]}"
        raise ScenarioError(source.path, [Problem(source.place((kind,), True), text)])


def override(source: Source, text: str) -> Keys:
    """Puts `key.sub=value` into the data, which is checked later. Raises UsageError if the data has no place for it."""
    dotted, equals, raw = text.partition("=")
    keys: Keys = tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in dotted.split("."))
    if not equals or not all(part != "" for part in keys):
        raise UsageError(f"--set {text}: write KEY=VALUE, such as job.timeout=2m or faults.0.when.step=30")
    try:
        value = value_of(raw, keys)
        holder: Any = source.data
        for part in keys[:-1]:
            holder = holder.setdefault(part, {}) if isinstance(holder, dict) else holder[part]
        holder[keys[-1]] = value.data[""]
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        raise UsageError(
            f"--set {text}: the scenario has no place for it; see its keys, and quote text that YAML reads otherwise"
        ) from None
    source.values |= {inside: source.place(keys) for inside in value.values}
    source.texts = {at: one for at, one in source.texts.items() if at[: len(keys)] != keys} | value.texts
    return keys


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
    if source.path.is_relative_to(registry.scenarios_folder()) and not _is_plain(own.get("command")):
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
    """The job of a scenario, with absolute paths in place of paths relative to its file, so that the job can be written
    to a file elsewhere. `folder`: the folder of its file. Each launcher whose
    keys the job has makes its own paths absolute."""
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
    return fill_all(value, {"here": str(folder)})


def _in(folder: Path, path: str) -> str:
    """The path, absolute unless it begins with a placeholder."""
    return path if path.startswith(("/", "{")) else str(folder / path)


def _merged(mine: Mapping[Keys, T], theirs: Mapping[Keys, T], kept: Container[object]) -> dict[Keys, T]:
    own = {keys: one for keys, one in mine.items() if keys[:1] != ("job",) or (len(keys) > 1 and keys[1] in kept)}
    return own | {keys: one for keys, one in theirs.items() if keys[:1] == ("job",)}


def _is_plain(command: object) -> bool:
    return isinstance(command, str) and shlex.split(command)[0] == "torchrun"
