"""Finds the plug-ins that packages offer, from their metadata and their source text. No plug-in is imported for this.
An entry point names a class (`"mine.fault" = "mine.faults:Fault"`), or a package or module (`mine = "mine.faults"`). A
package or module offers every class at the top level of its modules that declares a literal name, as in `name =
"mine.fault"` or `name: ClassVar[str] = "mine.fault"`. So a new plug-in is one new file, and its package does not have
to be installed again."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Offer:
    """A plug-in that is not imported yet. `value` is its place, as in an entry point: `module:Class`."""

    name: str
    value: str
    by: Distribution | None = None

    def load(self) -> Any:
        """Imports the class. Raises whatever its module raises."""
        return EntryPoint(self.name, self.value, "").load()

    @property
    def origin(self) -> str:
        return f"{self.value} of {_release(self.by)}" if self.by else self.value


def offered(group: str, name: str | None = None) -> list[Offer]:
    """All offers of a group, or only those with the given name. With a name fewer files are parsed."""
    found = (offer for entry in _entries(group) for offer in _of_entry(entry, name))
    return [offer for offer in found if name in (None, offer.name)]


def forget() -> None:
    """Clears the caches, so that packages that were installed in the meantime are found."""
    for kept in (_entries, _modules, _declared):
        kept.cache_clear()


@cache  # a distribution reads its metadata again each time it is asked
def _release(distribution: Distribution) -> str:
    return f"{distribution.name} {distribution.version}"


@cache  # the metadata of every installed package is read for it
def _entries(group: str) -> tuple[EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=f"torchaos.{group}"))


def _of_entry(entry: EntryPoint, name: str | None) -> Iterator[Offer]:
    """The offers of one entry point. A package that does not exist is offered too; then `load` raises the error of the
    import."""
    modules = None if ":" in entry.value else _modules(entry.value)
    if modules is None:
        yield Offer(entry.name, entry.value, entry.dist)
        return
    for module, text in modules:
        if name is None or f'"{name}"' in text or f"'{name}'" in text or name == _last(module):
            yield from (Offer(own, where, entry.dist) for own, where in _declared(module, text))


@cache
def _modules(package: str) -> tuple[tuple[str, str], ...] | None:
    """The modules of a package, or the module itself: names and source texts. None: there is no such package."""
    try:
        spec = find_spec(package)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
        if folders is None:
            return ((package, Path(str(spec.origin)).read_text(encoding="utf-8")),)
        files = sorted(path for folder in folders for path in Path(folder).glob("*.py"))
        names = (package if path.stem == "__init__" else f"{package}.{path.stem}" for path in files)
        return tuple((name, path.read_text(encoding="utf-8")) for name, path in zip(names, files, strict=True))
    except Exception:  # its parent packages are imported for this, and may raise anything
        return None


@cache
def _declared(module: str, text: str) -> tuple[tuple[str, str], ...]:
    """The names that the classes of a module declare, and the place of each class. A module that can't be parsed is
    offered under its own name; then `load` raises the error of the import."""
    try:
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    except (SyntaxError, ValueError):
        return ((_last(module), module),)
    return tuple((name, f"{module}:{found.name}") for found in classes for line in found.body if (name := _name(line)))


def _name(line: ast.stmt) -> str | None:
    """The text in `name = "text"` or `name: ClassVar[str] = "text"`. `name: str = "text"` is a parameter."""
    if isinstance(line, ast.Assign):
        targets = line.targets
    elif isinstance(line, ast.AnnAssign) and "ClassVar" in ast.unparse(line.annotation):
        targets = [line.target]
    else:
        return None
    named = any(isinstance(target, ast.Name) and target.id == "name" for target in targets)
    value = line.value
    return value.value if named and isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _last(module: str) -> str:
    return module.rpartition(".")[2]
