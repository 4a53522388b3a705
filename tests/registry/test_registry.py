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

from torchaos.harness import base_classes as face
from torchaos.harness import registry
from torchaos.harness.base_classes import Fault
from torchaos.harness.interfaces import UsageError

Offer = Callable[..., None]


def _nothing(*_: Any) -> None: ...


PARTS: dict[str, Any] = {
    "name": "fake.fits",
    "where": ("node",),
    **dict.fromkeys(("changes", "apply", "felt"), _nothing),
}


def without(*parts: str) -> type[Any]:
    """An injector that has all that its base class asks for, save these parts."""
    kept = {name: value for name, value in PARTS.items() if name not in parts}
    made: type[Any] = dataclass(frozen=True)(type("It", (Fault,), kept))
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


@pytest.mark.parametrize("part", ["name", "where", "apply", "felt"])
def test_a_part_that_lacks_is_named(offer: Offer, part: str) -> None:
    """Whatever the base class asks for and the class has not is named."""
    offer("fake.fits", without(part))
    with pytest.raises(UsageError, match=rf"lacks {part}; see torchaos.plugin.Fault"):
        registry.find("injectors", "fake.fits")


@pytest.mark.parametrize("group", registry.GROUPS)
def test_a_plug_in_builds_on_its_base_class(offer: Offer, group: str) -> None:
    """A class that has all parts and does not inherit is refused, and the text names the class to inherit from."""
    offer("fake.fits", dataclass(frozen=True)(type("It", (), dict(PARTS))), group)
    with pytest.raises(
        UsageError, match=r"does not inherit from torchaos\.plugin\.\w*\.?[A-Z]\w+; let it do so"
    ) as refused:
        registry.find(group, "fake.fits")
    module, _, name = str(refused.value).split("inherit from ")[1].split(";")[0].rpartition(".")
    assert getattr(importlib.import_module(module), name)


def test_a_plug_in_may_state_its_api(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module written for this API, or for none in particular, is loaded; one for another API gets one error."""
    offer("fake.fits", Fits)
    assert registry.find("injectors", "fake.fits") is Fits
    registry.forget()
    monkeypatch.setattr(sys.modules[Fits.__module__], "API", 99, raising=False)
    with pytest.raises(
        UsageError, match=rf"is written for API 99 of torchaos.plugin, and .* has API {face.API}; install"
    ):
        registry.find("injectors", "fake.fits")


def test_what_is_no_class_is_refused(offer: Offer) -> None:
    """An entry point that names an instance gets an error, not an attribute error later."""
    offer("fake.fits", Fits())
    with pytest.raises(UsageError, match="is not a class"):
        registry.find("injectors", "fake.fits")


def test_parameters_need_a_dataclass(offer: Offer) -> None:
    """A plain class has no fields that a scenario could give."""
    offer("fake.fits", type("Plain", (Fault,), dict(PARTS)))
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


def test_a_name_without_its_family_suggests_each_family_that_has_it() -> None:
    """Many faults end in `kill`, and the one that is most like the word is not always meant."""
    told = registry.unknown("injectors", "kill")
    assert told == "there is no injector 'kill'; did you mean 'container.kill' or 'node.kill' or 'process.kill'?"


CONDITION = """
from dataclasses import dataclass
from typing import ClassVar
from torchaos.plugin import Condition

@dataclass(frozen=True)
class It(Condition):
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
    (entry,) = (one for one in registry._entries(group) if one.dist and one.dist.name == "torchaos")
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
