"""Finds injectors, assertions, conditions and launchers by entry point, ours and those of other packages alike."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any, Literal

from torchaos.harness.contracts import UsageError

Group = Literal["injectors", "assertions", "conditions", "launchers"]
GROUPS: tuple[Group, ...] = ("injectors", "assertions", "conditions", "launchers")

# What a class must have to fit; an injector that does not say how it is taken back does not load.
_SHAPES: Mapping[str, tuple[str, ...]] = {
    "injectors": ("name", "where", "needs", "lethal", "hits", "plan", "changes", "apply", "probes", "felt"),
    "assertions": ("name", "needs", "judge"),
    "conditions": ("holds",),
    "launchers": ("name", "resources", "create"),
}


class Unknown(UsageError):
    """There is nothing of that name."""


@lru_cache
def _entries(group: Group) -> Mapping[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=f"torchaos.{group}")}


def names(group: Group) -> list[str]:
    return sorted(_entries(group))


@lru_cache
def find(group: Group, name: str) -> Any:
    """The class behind a name; only its own module is imported. Raises Unknown, or UsageError for a plug-in that does
    not load or does not fit."""
    entries, kind = _entries(group), group.removesuffix("s")
    if name not in entries:
        near = suggest(name, entries)
        raise Unknown(f"there is no {kind} {name!r}; {f'did you mean {near!r}?' if near else known(group)}")
    entry = entries[name]
    origin = f"{kind} {name!r} of {entry.dist.name if entry.dist else 'an unknown package'}"
    try:
        found = entry.load()
    except Exception as error:
        raise UsageError(
            f"{origin} does not load: {type(error).__name__}: {error}; mend or remove that package"
        ) from error
    missing = [part for part in _SHAPES[group] if not hasattr(found, part)]
    if missing:
        raise UsageError(f"{origin} does not fit: it has no {', no '.join(missing)}")
    return found


def all_of(group: Group) -> dict[str, Any]:
    return {name: find(group, name) for name in names(group)}


def known(group: Group) -> str:
    return f"there are {', '.join(names(group)) or 'none'}"


def suggest(word: str, candidates: Iterable[str]) -> str | None:
    """The nearest right name, if one is near."""
    return next(iter(difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)), None)
