"""Plug-ins from entry points: they are found by name, loaded one by one, and refused if they don't fit."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torchaos.harness import interfaces, registry
from torchaos.harness.interfaces import UsageError
from torchaos.harness.registry import offers

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
    with pytest.raises(UsageError, match=r"'fake.broken' \(no_such_module_at_all:Fault\).*ModuleNotFoundError.*repair"):
        registry.find("injectors", "fake.broken")


def test_an_undeclared_undo_does_not_load(offer: Offer) -> None:
    """An injector without changes() is refused for that reason."""
    offer("fake.fits", without("changes"))
    with pytest.raises(UsageError, match=r"has no changes\(\): it doesn't declare how it is undone"):
        registry.find("injectors", "fake.fits")


def test_a_stub_of_the_protocol_is_no_undo(offer: Offer) -> None:
    """Inheriting the protocol's empty changes() declares nothing."""
    offer("fake.fits", without("changes", base=interfaces.Injector))
    with pytest.raises(UsageError, match=r"has no changes\(\)"):
        registry.find("injectors", "fake.fits")


@pytest.mark.parametrize("part", ["name", "where", "needs", "lethal", "hits", "plan", "apply", "probes", "felt"])
def test_a_part_that_lacks_is_named(offer: Offer, part: str) -> None:
    """Whatever the protocol asks for and the class has not is named."""
    offer("fake.fits", without(part))
    with pytest.raises(UsageError, match=rf"lacks {part}; see Injector"):
        registry.find("injectors", "fake.fits")


def test_what_is_optional_need_not_be_declared(offer: Offer) -> None:
    """An injector that builds on no class of ours gets the defaults; what it declares itself stays."""
    offer("fake.fits", without())
    offer("fake.late", dataclass(frozen=True)(type("Fault", (), {**PARTS, "name": "fake.late", "late": True})))
    found = registry.find("injectors", "fake.fits")
    assert (found.late, found.lasting, found.phase, found.family, found.hooks) == (False, False, None, "", ())
    one = found()
    assert (one.asked(), one.signals(1.0), one.felt_by_twin(None, (), "f")) == ({}, None, None)
    assert registry.find("injectors", "fake.late").late is True


def test_the_optional_parts_of_the_other_groups(offer: Offer) -> None:
    """So do assertions, conditions and launchers."""
    offer(
        "bound", dataclass(type("Bound", (), {"name": "bound", "needs": frozenset(), "judge": _nothing})), "assertions"
    )
    offer("seen", dataclass(type("Seen", (), {"holds": _nothing})), "conditions")
    offer("far", type("Far", (), {"name": "far", "resources": _nothing, "create": _nothing}), "launchers")
    bound, seen = registry.find("assertions", "bound")(), registry.find("conditions", "seen")()
    far = registry.find("launchers", "far")
    assert (bound.harm, bound.expects_recovery) == (interfaces.Harm.OTHER, True)
    assert (seen.about_job, seen.probes(None), seen.of_faults({}, ())) == (True, (), {})
    assert (far.needs, far.cannot, far.needs_of((), {})) == (frozenset(), {}, frozenset())


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
    with pytest.raises(UsageError, match=r"declares the name 'fake.fits'"):
        registry.find("injectors", "fake.other")


def test_two_packages_may_not_share_a_name(offer: Offer) -> None:
    """Which of the two would run is nobody's guess: both are named."""
    offer("fake.fits", Fits)
    offer("fake.fits", without("felt"))
    with pytest.raises(UsageError, match=r"fake_plugin:thing0 and by fake_plugin:thing1; uninstall one"):
        registry.find("injectors", "fake.fits")


def test_an_unknown_name_gets_the_nearest(offer: Offer) -> None:
    """A misspelt name is answered with the right one; for a far one, the plug-in may not be installed."""
    offer("fake.fits", Fits)
    with pytest.raises(UsageError, match=r"there is no injector 'fake.fit'; did you mean 'fake.fits'\?"):
        registry.find("injectors", "fake.fit")
    with pytest.raises(
        UsageError, match=r"there is no injector 'zzz'; use one that .*list injectors. shows, or install"
    ):
        registry.find("injectors", "zzz")
    with pytest.raises(UsageError, match=r"'zzz'; no launcher is installed"):
        registry.find("launchers", "zzz")


CONDITION = """
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True)
class It:
    {name}

    def holds(self, events, now_s):
        return True
"""


@pytest.fixture
def package(offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an empty package that is offered as a whole."""
    folder = tmp_path / "offered_whole"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    offer("whole", value="offered_whole", group="conditions")
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "offered_whole"]:
        del sys.modules[name]


@pytest.mark.parametrize("line", ['name = "mine.it"', 'name: ClassVar[str] = "mine.it"', "name = 'mine.it'; other = 1"])
def test_a_file_in_an_offered_package_is_enough(package: Path, line: str) -> None:
    """A class that declares a name is found by that name, and its module is imported only when it is asked for."""
    (package / "one.py").write_text(CONDITION.format(name=line))
    (package / "broken.py").write_text("import no_such_module_at_all")
    assert registry.names("conditions") == ("mine.it",)
    assert not [name for name in sys.modules if name.startswith("offered_whole")]
    found = registry.find("conditions", "mine.it")
    assert (found.__module__, found.__name__) == ("offered_whole.one", "It")
    assert registry.conditions() == {"mine.it": found}


@pytest.mark.parametrize("line", ['name: str = "mine.it"', 'title = "mine.it"', 'name = "mine." + "it"', 'name = ""'])
def test_only_a_literal_name_is_a_declaration(package: Path, line: str) -> None:
    """A parameter that is called name, and text that is computed, declare nothing."""
    (package / "one.py").write_text(CONDITION.format(name=line))
    assert registry.names("conditions") == ()
    with pytest.raises(UsageError, match=r"there is no condition 'mine.it'"):
        registry.find("conditions", "mine.it")


def test_a_single_module_can_be_offered_too(package: Path, offer: Offer) -> None:
    """An entry point without a colon may name a module: all its plug-ins are offered, and nothing beside it."""
    for number in (1, 2):
        (package / f"module{number}.py").write_text(CONDITION.format(name=f'name = "mine.number{number}"'))
    offer("one", value="offered_whole.module1", group="launchers")
    assert registry.names("launchers") == ("mine.number1",)
    assert registry.names("conditions") == ("mine.number1", "mine.number2")


def test_a_file_that_cannot_be_parsed_does_no_harm_to_others(package: Path) -> None:
    """The others are found, and who asks for all gets an error that names the file and what is wrong in it."""
    (package / "good.py").write_text(CONDITION.format(name='name = "mine.it"'))
    (package / "half_written.py").write_text('class Half:\n    name = "mine.it"\n    def holds(')
    assert registry.find("conditions", "mine.it").__module__ == "offered_whole.good"
    with pytest.raises(UsageError, match=r"'half_written' \(offered_whole.half_written\) can't be loaded: SyntaxError"):
        registry.conditions()


def test_an_offered_package_that_is_not_there_is_named(offer: Offer) -> None:
    """The error says which entry point, and that its package is missing; the others can be used."""
    offer("fake.fits", Fits)
    offer("gone", value="no_such_package_at_all.faults")
    assert registry.find("injectors", "fake.fits") is Fits
    with pytest.raises(UsageError, match=r"'gone' \(no_such_package_at_all.faults\) can't be loaded: ModuleNotFound"):
        registry.injectors()


def test_two_files_may_not_share_a_name(package: Path, offer: Offer) -> None:
    """Both are named, whether one entry point offers them or two."""
    for module in ("one", "two"):
        (package / f"{module}.py").write_text(CONDITION.format(name='name = "mine.it"'))
    with pytest.raises(UsageError, match=r"given by offered_whole.one:It and by offered_whole.two:It; uninstall one"):
        registry.find("conditions", "mine.it")
    offer("mine.it", value="elsewhere:It", group="conditions")
    (package / "two.py").unlink()
    registry.forget()
    with pytest.raises(UsageError, match=r"given by elsewhere:It and by offered_whole.one:It; uninstall one"):
        registry.find("conditions", "mine.it")


@pytest.mark.parametrize("group", registry.GROUPS)
def test_reading_finds_what_importing_finds(group: str) -> None:
    """The names of what comes with torchaos are read from its source text, and none is missed or made up."""
    (entry,) = (one for one in offers._entries(group) if one.dist and one.dist.name == "torchaos")
    package = importlib.import_module(entry.value)
    modules = [importlib.import_module(f"{entry.value}.{one.name}") for one in pkgutil.iter_modules(package.__path__)]
    declared = {
        vars(found)["name"]: found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type) and found.__module__ == module.__name__ and isinstance(vars(found).get("name"), str)
    }
    assert declared
    assert registry.all_of(group).items() >= declared.items()


def test_suggest_is_silent_when_nothing_is_near() -> None:
    """No suggestion is better than a silly one."""
    assert registry.suggest("timout", ["timeout", "times"]) == "timeout"
    assert registry.suggest("zzz", ["timeout", "times"]) is None
