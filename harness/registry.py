"""Finds plug-ins by name: injectors, assertions, conditions, launchers and checkpoint formats, of torchaos and of other
packages; and the scenarios that come with torchaos. A class is refused if it lacks what its base class demands; in
particular, an injector is refused if it doesn't declare how it is undone.

What packages offer is found in their metadata and their source text. A class is imported only when it is needed. An
entry point names a class (`"mine.fault" = "mine.faults:Fault"`), or a package or module (`mine = "mine.faults"`). A
package or module offers every class at the top level of its modules that declares a literal name, as in `name =
"mine.fault"` or `name: ClassVar[str] = "mine.fault"`. So a new plug-in is one new file, and its package does not have
to be installed again."""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import Distribution, EntryPoint
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchaos.harness.base_classes import API, Assertion, Condition, Fault
from torchaos.harness.interfaces import CheckpointFormat, Launcher, UsageError
from torchaos.harness.protocol.wire import Phase

if TYPE_CHECKING:
    from torchaos.harness.record.plan import PlannedFault


@dataclass(frozen=True)
class _Group:
    singular: str  # what messages call a plug-in of this group
    base: type[Any]  # each plug-in inherits from it
    face: str  # where a plug-in imports the base
    says: tuple[str, ...]  # class attributes without a default
    does: tuple[str, ...]  # methods without a default


_GROUPS = {
    "injectors": _Group("injector", Fault, "torchaos.plugin.Fault", ("name", "where"), ("changes", "apply", "felt")),
    "assertions": _Group("assertion", Assertion, "torchaos.plugin.Assertion", ("name", "needs"), ("judge",)),
    "conditions": _Group("condition", Condition, "torchaos.plugin.Condition", (), ("holds",)),
    "launchers": _Group("launcher", Launcher, "torchaos.plugin.launchers.Launcher", ("name",), ("resources", "create")),
    "formats": _Group("checkpoint format", CheckpointFormat, "torchaos.plugin.checkpoints.Format", ("name",), ()),
}
GROUPS = tuple(_GROUPS)
_PLAIN = (Launcher, CheckpointFormat)  # a scenario gives them no parameters


def phase_of(injector: str) -> Phase | None:
    """The phase in which faults of this kind are applied if the trigger names only a step. None: at the start of the
    step."""
    phase = find("injectors", injector).phase
    return None if phase is None else Phase(phase)


def is_lethal(injector: str) -> bool:
    """Whether the target dies of this fault. Also True for each fault that hits a torchrun process: its ranks may live
    on as orphans, but they are no recovery."""
    found = find("injectors", injector)
    return bool(found.lethal or found.hits == "agents")


def family_of(injector: str) -> str:
    """The family of a fault, such as gpu or numeric: the family that its injector declares, or else the first part of
    its name."""
    declared = find("injectors", injector).family if injector in names("injectors") else ""
    return str(declared) or injector.partition(".")[0]


def lasts(injector: str) -> bool:
    """Whether such a fault stays on until it is undone. False if it ends by itself."""
    found = find("injectors", injector)
    return not found.lethal and bool("node" in found.where or found.lasting)


def injectors() -> dict[str, type[Fault]]:
    """All injectors by name. Raises UsageError if one of them can't be loaded."""
    return all_of("injectors")


def assertions() -> dict[str, type[Assertion]]:
    return all_of("assertions")


def conditions() -> dict[str, type[Condition]]:
    return all_of("conditions")


def all_of(group: str) -> dict[str, type[Any]]:
    return {name: find(group, name) for name in names(group)}


def names(group: str) -> tuple[str, ...]:
    """The registered names, in alphabetical order. No plug-in is loaded."""
    return tuple(sorted({offer.name for offer in offered(group)}))


@cache
def find(group: str, name: str) -> type[Any]:
    """Loads the class with that name, and no other. Raises UsageError if there is none, or if it can't be used."""
    kind = _GROUPS[group]
    found = {offer.value: offer for offer in offered(group, name)}
    if not found:
        raise UsageError(unknown(group, name))
    if len(found) > 1:
        origins = " and by ".join(sorted(offer.origin for offer in found.values()))
        raise UsageError(f"{kind.singular} {name!r} is given by {origins}; uninstall one")
    (offer,) = found.values()
    return _load(kind, offer)


def unknown(group: str, name: str) -> str:
    """The error message for a name that is not registered."""
    known, kind = names(group), _GROUPS[group].singular
    family_left_out = [one for one in known if one.rpartition(".")[2] == name]
    if near := family_left_out[:4] or [*filter(None, [suggest(name, known)])]:
        return f"there is no {kind} {name!r}; did you mean {' or '.join(map(repr, near))}?"
    if not known:
        return f"there is no {kind} {name!r}; no {kind} is installed"
    installed = f"use one that `torchaos list {group}` shows, or install the plug-in that has it for {sys.executable}"
    return f"there is no {kind} {name!r}; {installed}"


def suggest(word: str, names: Iterable[str]) -> str | None:
    """The known name that is most like `word`. None if no name is similar."""
    return next(iter(difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)), None)


def injector_of(fault: PlannedFault) -> Fault:
    """The injector with the planned parameters."""
    found: Fault = find("injectors", fault.inject)(**fault.params)
    return found


def seconds_of(found: type[Any]) -> frozenset[str]:
    """The parameters of a class that are durations. Reports format them as durations."""
    return frozenset(
        parameter.name for parameter in fields(found) if parameter.init and "Seconds" in str(parameter.type)
    )


def forget() -> None:
    """Clears the caches, so that packages that were installed in the meantime are found."""
    for kept in (_entries, _modules, find):
        kept.cache_clear()


def _load(kind: _Group, offer: Offer) -> type[Any]:
    who = f"{kind.singular} {offer.name!r} ({offer.origin})"
    try:
        found = offer.load()
    except Exception as error:  # another package's code may raise anything
        raise UsageError(
            f"{who} can't be loaded: {type(error).__name__}: {error}; repair or uninstall that package"
        ) from error
    if not isinstance(found, type):
        raise UsageError(f"{who} is not a class; its entry point must name one")
    wants = getattr(sys.modules.get(found.__module__), "API", API)
    if wants != API:
        raise UsageError(
            f"{who} is written for API {wants} of torchaos.plugin, and this torchaos has API {API}; install another "
            "release of one of them"
        )
    if kind.base not in found.__mro__:
        raise UsageError(f"{who} does not inherit from {kind.face}; let it do so")
    lacks = _missing(kind, found)
    if "changes" in lacks:
        raise UsageError(f"{who} has no changes(): it doesn't declare how it is undone, so it is not loaded; add it")
    if lacks:
        raise UsageError(f"{who} lacks {', '.join(lacks)}; see {kind.face}")
    if (declared := getattr(found, "name", offer.name)) != offer.name:
        raise UsageError(f"{who} declares the name {declared!r}; the entry point must have the same name")
    if kind.base not in _PLAIN and not is_dataclass(found):
        raise UsageError(f"{who} is not a dataclass; its fields are the parameters that a scenario gives")
    return found


def _missing(kind: _Group, found: type[Any]) -> list[str]:
    """The attributes and methods that the class lacks. The methods of the base are only stubs."""
    methods = [name for name in kind.does if getattr(found, name) is getattr(kind.base, name)]
    return [*(name for name in kind.says if not hasattr(found, name)), *methods]


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
    """The text in `name = "text"` or `name: ClassVar[str] = "text"`. None for all else, also for `name: str = "text"`,
    which declares a parameter."""
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


_GAME_DAYS = "gamedays"
# The scenarios to start with: they need nothing but torchrun, and find the most frequent defects.
FIRST_SCENARIOS = (
    "process/kill-rank", "process/kill-during-save", "process/freeze-rank", "checkpoint/truncated-checkpoint",
    "checkpoint/flipped-bits",
)  # fmt: skip


def scenarios_folder() -> Path:
    return Path(str(files("torchaos.scenarios")))


def scenario_names() -> list[str]:
    """The names of all ready scenarios, without game days."""
    found = (path.relative_to(scenarios_folder()) for path in scenarios_folder().glob("*/*.yaml"))
    return sorted(str(path.with_suffix("")) for path in found if path.parts[0] != _GAME_DAYS)


def find_scenario(text: str) -> Path:
    """The scenario file: `text` as a path if that file exists, or else the ready scenario of that name. Raises
    UsageError if there is neither."""
    path = Path(text)
    if path.exists() or path.suffix or text in ("", ".", ".."):
        return path
    ready = scenarios_folder() / f"{text}.yaml"
    if ready.is_file() and ready.resolve().is_relative_to(scenarios_folder().resolve()):
        return ready
    alike = [name for name in scenario_names() if name.endswith(f"/{text}")] or get_close_matches(
        text, scenario_names(), 2
    )
    hint = f"did you mean {' or '.join(alike)}?" if alike else "`torchaos list scenarios` shows the ready ones"
    raise UsageError(f"{text}: there is no such file, and no ready scenario of this name; {hint}")


def scenario_name(path: Path) -> str:
    """How a scenario is called in messages: the name of a ready scenario, or the path of another file."""
    try:
        return str(path.relative_to(scenarios_folder()).with_suffix(""))
    except ValueError:
        return str(path)
