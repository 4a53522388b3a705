"""Loads scenarios. All mistakes in a file are reported at once, each with its place and advice."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from torchaos.harness.contracts import UsageError
from torchaos.harness.scenario.checks import check
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.mistakes import most_telling, words
from torchaos.harness.scenario.other_job import with_job
from torchaos.harness.scenario.parameters import Tell
from torchaos.harness.scenario.yaml_source import Keys, Problem, ScenarioError, Source, read, value_of

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
    Raises ScenarioError."""
    source = read(path)
    _check_kind(model, source)
    source = with_job(source, job) if job else source
    overridden = [override(source, text) for text in overrides]
    problems: list[Problem] = []

    def tell(keys: Keys, text: str, key: bool = False) -> None:
        override = next((".".join(map(str, at)) for at in overridden if keys[: len(at)] == at), None)
        problems.append(Problem(source.place(keys, key), f"--set {override}: {text}" if override else text))

    found = _typed(model, source, tell)
    if found is not None:
        check(found, tell)
    if problems or found is None:
        raise ScenarioError(path, problems)
    return found


_OTHER_KINDS = {
    "gameday": "a game day; use `torchaos gameday FILE`, or with --plan to see only its plan",
    "gate": "a gate; use `torchaos gate FILE`",
}


def _check_kind(model: type[BaseModel], source: Source) -> None:
    """Raises ScenarioError if the file belongs to another command."""
    kind = next((name for name in _OTHER_KINDS if name in source.data), None)
    if model is Scenario and kind and "scenario" not in source.data:
        raise ScenarioError(source.path, [Problem(source.place((kind,), True), f"this is {_OTHER_KINDS[kind]}")])


def override(source: Source, text: str) -> Keys:
    """Puts `key.sub=value` into the data, which is checked later. Raises UsageError if the data has no place for it."""
    dotted, equals, raw = text.partition("=")
    keys: Keys = tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in dotted.split("."))
    if not equals or not all(part != "" for part in keys):
        raise UsageError(f"--set {text}: write KEY=VALUE, such as job.timeout=2m or faults.0.when.step=30")
    try:
        value = value_of(raw)
        holder: Any = source.data
        for part in keys[:-1]:
            holder = holder.setdefault(part, {}) if isinstance(holder, dict) else holder[part]
        holder[keys[-1]] = value
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        raise UsageError(
            f"--set {text}: the scenario has no place for it; see its keys, and quote text that YAML reads otherwise"
        ) from None
    return keys


def _typed(model: type[Model], source: Source, tell: Tell) -> Model | None:
    try:
        return model.model_validate(source.data)
    except ValidationError as error:
        for keys, found in most_telling(source, error, model).items():
            tell(keys, words(found, keys, model), key=found["type"] == "extra_forbidden")
        return None
