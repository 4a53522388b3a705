"""Finds plug-ins by name: injectors, assertions, conditions, launchers and checkpoint formats, of torchaos and of other
packages. A class is imported only when it is needed. It is refused if it doesn't fit its interface in contracts; in
particular, an injector is refused if it doesn't declare how it is undone."""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torchaos.harness import interfaces
from torchaos.harness.agent.rank_faults import Fault
from torchaos.harness.agent.wire import Phase
from torchaos.harness.interfaces import UsageError
from torchaos.harness.registry.offers import Offer, offered
from torchaos.harness.registry.offers import forget as forget_offers
from torchaos.harness.rollback.handles import REGISTRY as HANDLES

if TYPE_CHECKING:
    from torchaos.harness.record.plan import PlannedFault


@dataclass(frozen=True)
class _Group:
    singular: str  # what messages call a plug-in of this group
    shape: type
    says: tuple[str, ...]  # class attributes that every plug-in must have
    does: tuple[str, ...]  # methods that every plug-in must have
    defaults: type[Any] = object  # the class that has the default of each optional attribute
    may: tuple[str, ...] = ()  # optional attributes and methods


_GROUPS = {
    "injectors": _Group(
        "injector",
        interfaces.Injector,
        ("name", "where", "needs", "lethal", "hits"),
        ("plan", "changes", "apply", "probes", "felt"),
        Fault,
        (
            "lasting",
            "phase",
            "late",
            "family",
            "imitates",
            "replays",
            "consent",
            "hooks",
            "on_collectives",
            "own_disk",
            "felt_by_twin",
            "asked",
            "signals",
        ),
    ),
    "assertions": _Group(
        "assertion",
        interfaces.Assertion,
        ("name", "needs"),
        ("judge",),
        interfaces.Assertion,
        ("harm", "expects_recovery", "judge_replicas"),
    ),
    "conditions": _Group(
        "condition", interfaces.Condition, (), ("holds",), interfaces.Condition, ("about_job", "probes", "of_faults")
    ),
    "launchers": _Group(
        "launcher",
        interfaces.Launcher,
        ("name",),
        ("resources", "create"),
        interfaces.Launcher,
        ("needs", "cannot", "needs_of", "replicas", "sets_rendezvous", "on_nodes"),
    ),
    "formats": _Group(
        "checkpoint format",
        interfaces.CheckpointFormat,
        ("name", "suffixes"),
        ("is_folder", "read_file", "read_folder"),
    ),
}
GROUPS = tuple(_GROUPS)
_PLAIN = (interfaces.Launcher, interfaces.CheckpointFormat)  # a scenario gives them no parameters


def phase_of(injector: str) -> Phase | None:
    """The phase in which faults of this kind are applied if the trigger names only a step. None: at the start of the
    step."""
    phase = find("injectors", injector).phase
    return None if phase is None else Phase(phase)


def is_lethal(injector: str) -> bool:
    """Whether the target dies of this fault. Also True for each fault that hits a torchrun process: its ranks may live
    on as orphans, but the job has not recovered."""
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


def injectors() -> dict[str, type[interfaces.Injector]]:
    """All injectors by name. Raises UsageError if one of them can't be loaded."""
    return all_of("injectors")


def assertions() -> dict[str, type[interfaces.Assertion]]:
    return all_of("assertions")


def conditions() -> dict[str, type[interfaces.Condition]]:
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
    near = suggest(name, known)
    if near:
        return f"there is no {kind} {name!r}; did you mean {near!r}?"
    if not known:
        return f"there is no {kind} {name!r}; no {kind} is installed"
    installed = f"use one that `torchaos list {group}` shows, or install the plug-in that has it for {sys.executable}"
    return f"there is no {kind} {name!r}; {installed}"


def suggest(word: str, names: Iterable[str]) -> str | None:
    """The known name that is most like `word`. None if no name is similar."""
    return next(iter(difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)), None)


def injector_of(fault: PlannedFault) -> interfaces.Injector:
    """The injector with the planned parameters."""
    found: interfaces.Injector = find("injectors", fault.inject)(**fault.params)
    return found


def seconds_of(found: type[Any]) -> frozenset[str]:
    """The parameters of a class that are durations. Reports format them as durations."""
    return frozenset(
        parameter.name for parameter in fields(found) if parameter.init and "Seconds" in str(parameter.type)
    )


def forget() -> None:
    """Clears the caches, so that packages that were installed in the meantime are found."""
    forget_offers()
    find.cache_clear()


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
    if (lacks := _missing(kind, found)) and lacks[0] == "changes":
        raise UsageError(f"{who} has no changes(): it doesn't declare how it is undone, so it is not loaded; add it")
    if kind.singular == "injector" and not _declares_undo(found):
        raise UsageError(
            f"{who}: its changes() returns neither handles nor Irreversible: it doesn't declare how it is "
            "undone, so it is not loaded; annotate which of the two it returns"
        )
    if lacks:
        raise UsageError(f"{who} lacks {', '.join(lacks)}; see {kind.shape.__name__} in torchaos.harness.interfaces")
    if (declared := getattr(found, "name", offer.name)) != offer.name:
        raise UsageError(f"{who} declares the name {declared!r}; the entry point must have the same name")
    if kind.shape not in _PLAIN and not is_dataclass(found):
        raise UsageError(f"{who} is not a dataclass; its fields are the parameters that a scenario gives")
    for name in kind.may:
        if not hasattr(found, name):
            setattr(found, name, inspect.getattr_static(kind.defaults, name))
    return found


def _missing(kind: _Group, found: type[Any]) -> list[str]:
    """The attributes and methods that the class lacks, `changes` first. A method that the class inherits from the
    protocol is only a stub, so it counts as missing."""
    methods = [
        name
        for name in kind.does
        if not callable(getattr(found, name, None)) or getattr(found, name) is getattr(kind.shape, name, None)
    ]
    lacks = [*methods, *(name for name in kind.says if not hasattr(found, name))]
    return sorted(lacks, key=lambda name: name != "changes")


def _declares_undo(injector: type[Any]) -> bool:
    """Whether `changes` seems to return something. What it returns can't be known before it is called."""
    changes = inspect.unwrap(injector.changes)
    says = str(
        getattr(changes, "__annotations__", {}).get("return", "Handle")
    )  # no annotation: its source must return something
    if not any(word in says for word in ("Handle", "Irreversible", *(one.__name__ for one in HANDLES.values()))):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(changes)))
    except (OSError, TypeError, SyntaxError):  # no source: the check before the fault is applied decides
        return True
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    given = [value for value in returned if value is not None and not _is_none(value)]
    return bool(given) or any(isinstance(node, (ast.Raise, ast.Yield)) for node in ast.walk(tree))


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value in (None, Ellipsis)
