"""The reference that is generated from the code explains everything that exists."""

from __future__ import annotations

import re

import pytest
from reference import PAGES, comments, plugins
from reference.commands import all_commands

from torchaos.harness import registry
from torchaos.harness.gameday.day_grammar import GameDay
from torchaos.harness.protocol import wire
from torchaos.harness.record import result
from torchaos.harness.running.capabilities import known
from torchaos.harness.scenario.checks import with_settings
from torchaos.harness.scenario.field_types import Strict
from torchaos.harness.scenario.grammar import Scenario


@pytest.mark.parametrize("group", ["injectors", "assertions", "conditions"])
def test_every_parameter_is_described(group: str) -> None:
    """What a parameter means stands in the docstring of its class, by its name, or among those that many share."""
    found = registry.all_of(group)
    assert plugins.undescribed(found.values()) == []
    page = PAGES[f"reference/{group}.md"]()
    assert [name for name in found if f"# {name}\n" not in page] == []


def test_every_injector_says_how_it_is_taken_back() -> None:
    """Either it is, or it says in a sentence why it can't be; and what it needs is explained."""
    told = {name: plugins.undo(found) for name, found in registry.injectors().items()}
    assert told["process.freeze"] == "taken back"
    assert told["process.kill"].startswith("none: a dead process can't be brought back")
    assert all(text == "taken back" or re.fullmatch(r"none: \w[^{}]+", text) for text in told.values()), told
    assert all(found.needs <= known().keys() for found in registry.injectors().values())


@pytest.mark.parametrize("model", [Scenario, GameDay])
def test_every_key_is_described(model: type[Strict]) -> None:
    """Each key of the grammar has a sentence of its own, and so has each part."""
    schema = with_settings(model).model_json_schema(by_alias=True)
    parts = {model.__name__: schema, **schema["$defs"]}
    keys = {f"{name}.{key}": value for name, part in parts.items() for key, value in part["properties"].items()}
    assert [name for name, value in keys.items() if not value.get("description")] == []
    assert [name for name, part in parts.items() if not part.get("description")] == []


def test_every_event_is_described() -> None:
    """Each kind of event has a comment where its payload is declared, and its row."""
    said = comments.of_entries(wire, "PAYLOADS")
    assert [kind.name for kind in wire.Kind if not said[kind.name]] == []
    page = PAGES["reference/events.md"]()
    assert [kind.value for kind in wire.Kind if f"| `{kind.value}` |" not in page] == []


def test_every_command_and_option_is_described() -> None:
    """Each command has its section with all its options, and each option a text."""
    page = PAGES["reference/cli.md"]()
    for name, command in all_commands():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert command.help, name
        for option in (one for one in command.params if one.param_type_name == "option"):
            assert getattr(option, "help", None), (name, option.name)
            assert option.opts[0] in section, (name, option.name)


def test_each_exit_code_has_its_row() -> None:
    """In the table, and a place in the order in which the worst counts."""
    page = PAGES["reference/exit-codes.md"]()
    rows = re.findall(r"^\| (\d) \| .* \|$", page, re.MULTILINE)
    order = re.search(r"in the order ([\d, ]+)", page)
    assert order is not None
    assert sorted(rows) == sorted(order[1].split(", ")) == [str(int(code)) for code in sorted(result.ExitCode)]
