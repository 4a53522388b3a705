"""What packages offer by entry point: found by name, loaded one by one, refused where it doesn't fit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from torchaos.harness import contracts, registry
from torchaos.harness.contracts import UsageError

Offer = Callable[..., None]


def _nothing(*_: Any) -> None: ...


def _changes(self: Any, site: Any) -> Any:
    return []


def _changes_nothing(self: Any, site: Any) -> None:
    site.look()


def _falls_through(self, site):  # type: ignore[no-untyped-def]  # as others may write it
    site.look()
    return


def _other_things(self: Any, site: Any) -> list[str]:
    return ["rm -r /tmp/it"]


_changes.__annotations__["return"] = "Sequence[Handle]"

PARTS: dict[str, Any] = {
    "name": "fake.fits",
    "where": ("node",),
    "needs": frozenset(),
    "lethal": False,
    "hits": "ranks",
    **dict.fromkeys(("plan", "apply", "probes", "felt"), _nothing),
    "changes": _changes,
}


def without(*parts: str, base: type[Any] = object) -> type[Any]:
    """An injector that has all that the protocol asks for, save these parts."""
    kept = {name: value for name, value in PARTS.items() if name not in parts}
    made: type[Any] = dataclass(frozen=True)(type("Fault", (base,), kept))
    return made


Fits = without()


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Puts classes on offer as injectors (or another group), and nothing else."""
    module = ModuleType("fake_plugin")
    monkeypatch.setitem(sys.modules, "fake_plugin", module)
    entries: list[EntryPoint] = []

    def add(name: str, found: object = None, group: str = "injectors", value: str = "") -> None:
        attribute = f"thing{len(entries)}"
        if not value:
            setattr(module, attribute, found)
        entries.append(EntryPoint(name, value or f"fake_plugin:{attribute}", f"torchaos.{group}"))

    def entry_points(*, group: str) -> list[EntryPoint]:
        return [entry for entry in entries if entry.group == group]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    registry.forget()
    yield add
    registry.forget()


def test_a_class_is_found_by_name(offer: Offer) -> None:
    """What fits the protocol is given out, alone and among all of its kind."""
    offer("fake.fits", Fits)
    assert registry.find("injectors", "fake.fits") is Fits
    assert registry.injectors() == {"fake.fits": Fits}
    assert registry.names("injectors") == ("fake.fits",)
    assert registry.assertions() == {}


@pytest.mark.parametrize("changes", [_changes_nothing, _falls_through, _other_things])
def test_what_does_not_declare_its_undo_is_not_loaded(offer: Offer, changes: Any) -> None:
    """An injector whose `changes` returns neither handles nor Irreversible is refused, and the text says why."""
    offer("fake.fits", dataclass(frozen=True)(type("Fault", (), {**PARTS, "changes": changes})))
    with pytest.raises(UsageError, match=r"returns neither handles nor Irreversible.*not loaded"):
        registry.find("injectors", "fake.fits")


def test_others_are_not_loaded(offer: Offer) -> None:
    """A package that can't be imported does no harm to those who don't ask for its fault."""
    offer("fake.fits", Fits)
    offer("fake.broken", value="no_such_module_at_all:Fault")
    assert registry.find("injectors", "fake.fits") is Fits
    assert registry.names("injectors") == ("fake.broken", "fake.fits")


def test_a_broken_package_is_named(offer: Offer) -> None:
    """The error says which entry point, which error, and what to do."""
    offer("fake.broken", value="no_such_module_at_all:Fault")
    with pytest.raises(UsageError, match=r"'fake.broken' \(no_such_module_at_all:Fault\).*ModuleNotFoundError.*mend"):
        registry.find("injectors", "fake.broken")


def test_an_undeclared_undo_does_not_load(offer: Offer) -> None:
    """An injector without changes() is refused for that reason."""
    offer("fake.fits", without("changes"))
    with pytest.raises(UsageError, match=r"has no changes\(\): it doesn't declare how it is taken back"):
        registry.find("injectors", "fake.fits")


def test_a_stub_of_the_protocol_is_no_undo(offer: Offer) -> None:
    """Inheriting the protocol's empty changes() declares nothing."""
    offer("fake.fits", without("changes", base=contracts.Injector))
    with pytest.raises(UsageError, match=r"has no changes\(\)"):
        registry.find("injectors", "fake.fits")


@pytest.mark.parametrize("part", ["name", "where", "needs", "lethal", "hits", "plan", "apply", "probes", "felt"])
def test_a_part_that_lacks_is_named(offer: Offer, part: str) -> None:
    """Whatever the protocol asks for and the class has not is named."""
    offer("fake.fits", without(part))
    with pytest.raises(UsageError, match=rf"lacks {part}; see Injector"):
        registry.find("injectors", "fake.fits")


def test_what_is_no_class_is_refused(offer: Offer) -> None:
    """An entry point that names an instance gets an error, not an attribute error later."""
    offer("fake.fits", Fits())
    with pytest.raises(UsageError, match="is not a class"):
        registry.find("injectors", "fake.fits")


def test_parameters_need_a_dataclass(offer: Offer) -> None:
    """A plain class has no fields that a scenario could give."""
    offer("fake.fits", type("Plain", (), dict(PARTS)))
    with pytest.raises(UsageError, match="is not a dataclass"):
        registry.find("injectors", "fake.fits")


def test_the_two_names_must_agree(offer: Offer) -> None:
    """Events and reports use the class's name, scenarios the entry point's: two names would confuse."""
    offer("fake.other", Fits)
    with pytest.raises(UsageError, match=r"calls itself 'fake.fits'"):
        registry.find("injectors", "fake.other")


def test_two_packages_may_not_share_a_name(offer: Offer) -> None:
    """Which of the two would run is nobody's guess: both are named."""
    offer("fake.fits", Fits)
    offer("fake.fits", without("felt"))
    with pytest.raises(UsageError, match=r"fake_plugin:thing0 and by fake_plugin:thing1; uninstall one"):
        registry.find("injectors", "fake.fits")


def test_an_unknown_name_gets_the_nearest(offer: Offer) -> None:
    """A misspelt name is answered with the right one, a far one with all."""
    offer("fake.fits", Fits)
    with pytest.raises(UsageError, match=r"there is no injector 'fake.fit'; did you mean 'fake.fits'\?"):
        registry.find("injectors", "fake.fit")
    with pytest.raises(UsageError, match=r"there is no injector 'zzz'; use fake.fits"):
        registry.find("injectors", "zzz")
    with pytest.raises(UsageError, match=r"none: no launcher is installed"):
        registry.find("launchers", "zzz")


def test_suggest_is_silent_when_nothing_is_near() -> None:
    """No suggestion is better than a silly one."""
    assert registry.suggest("timout", ["timeout", "times"]) == "timeout"
    assert registry.suggest("zzz", ["timeout", "times"]) is None
