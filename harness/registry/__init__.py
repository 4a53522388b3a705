"""Finds plug-ins by name: injectors, assertions, conditions, launchers and checkpoint formats, of torchaos and of other
packages. A class is imported only when it is needed. It is refused if it lacks what its base class demands; in
particular, an injector is refused if it doesn't declare how it is undone."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torchaos.harness.base_classes import API, Assertion, Condition, Fault
from torchaos.harness.interfaces import CheckpointFormat, Launcher, UsageError
from torchaos.harness.protocol.wire import Phase
from torchaos.harness.registry.offers import Offer, offered
from torchaos.harness.registry.offers import forget as forget_offers

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
