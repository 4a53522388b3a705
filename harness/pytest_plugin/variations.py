"""Variations of a scenario: seeds, ranks, phases, steps, or any other value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from torchaos.harness.pytest_plugin.outcome import Broken
from torchaos.harness.registry import suggest

_KEYS = {"rank": "faults.0.target.rank", "phase": "faults.0.when.phase", "step": "faults.0.when.step"}
_OPTIONS = {"seeds": "seed", "ranks": "rank", "phases": "phase", "steps": "step"}  # the marker's arguments
_LISTS = (*_OPTIONS, "set", "explore")


@dataclass(frozen=True)
class Variation:
    name: str  # in brackets after the test's name; empty if there is only one variation
    seed: int | None
    overrides: tuple[str, ...]  # in the form of `--set`


def of_options(config: pytest.Config) -> list[Variation]:
    """The variations from the command line. Raises pytest.UsageError if an option can't be read."""
    axes: list[tuple[str, Sequence[Any]]] = []
    if seeds := config.getoption("--torchaos-seeds"):
        axes.append(("seed", _split("--torchaos-seeds", seeds)))
    for text in config.getoption("--torchaos-each"):
        key, equals, values = text.partition("=")
        if not equals or not key:
            raise pytest.UsageError(f"--torchaos-each {text}: write KEY=VALUE,VALUE, such as rank=0,1")
        axes.append((key, _split(f"--torchaos-each {key}", values)))
    return _crossed(axes, config.getoption("--torchaos-set"))


def of_marker(given: Mapping[str, Any]) -> list[Variation]:
    """The variations from a marker, at least one. Raises Broken if the marker can't be read."""
    for name in given:
        if name not in (*_LISTS, "scenario", "each", "judge"):
            near = suggest(name, [*_LISTS, "each", "judge"])
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(_LISTS)}, each and judge"
            raise Broken(f"the marker torchaos has no {name}; {hint}")
    each = given.get("each", {})
    if not isinstance(each, Mapping):
        raise Broken(f"the marker torchaos: each is a mapping, such as {{'rank': [0, 1]}}, not {each!r}")
    for name, values in [*((name, given[name]) for name in _LISTS if name in given), *each.items()]:
        if not isinstance(values, (list, tuple, range, set, frozenset)):
            raise Broken(f"the marker torchaos: {name} is a list, such as {name}=[{values!r}], not {values!r}")
    axes = [(key, list(given[option])) for option, key in _OPTIONS.items() if given.get(option)]
    axes += [(key, list(values)) for key, values in each.items()]
    if empty := [key for key, values in axes if not values]:
        raise Broken(f"the marker torchaos has no value for {empty[0]}, so nothing would be run; give at least one")
    try:
        return _crossed(axes, given.get("set", ()))
    except pytest.UsageError as error:
        raise Broken(f"the marker torchaos: {error}") from None


def _crossed(axes: Sequence[tuple[str, Sequence[Any]]], always: Iterable[str]) -> list[Variation]:
    found = []
    for values in product(*(values for _key, values in axes)):
        pairs = [(key, value) for (key, _), value in zip(axes, values, strict=True)]
        seeds = [value for key, value in pairs if key == "seed"]
        overrides = tuple(f"{_KEYS.get(key, key)}={value}" for key, value in pairs if key != "seed")
        name = "-".join(f"{key}={value}" for key, value in pairs)
        found.append(Variation(name, _seed(seeds[0]) if seeds else None, (*always, *overrides)))
    return found


def _seed(value: Any) -> int:
    if not re.fullmatch(r"\d{1,18}", str(value)):
        bound = ", at least 0" if str(value).startswith("-") else ""
        raise pytest.UsageError(f"{value!r} is not a seed: a seed is a whole number{bound}")
    return int(value)


def _split(option: str, text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise pytest.UsageError(f"{option}: no value; write them with commas between, such as 0,1")
    return found
