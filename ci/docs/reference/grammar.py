"""The pages about the keys of scenarios and game days, from the models that read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from torchaos.harness.gameday.day_grammar import GameDay
from torchaos.harness.scenario.checks import with_settings
from torchaos.harness.scenario.grammar import Scenario

from .markdown import NOTHING, code, default, table, words

Schema = Mapping[str, Any]


def scenario() -> str:
    return _page(
        "The grammar of a scenario",
        "This page lists every key of a scenario file. It is for engineers who write scenarios; the guide is "
        "[write a scenario](../write-a-scenario.md), and `torchaos schema` prints the same as JSON Schema.",
        Scenario,
    )


def gameday() -> str:
    return _page(
        "The grammar of a game day",
        "This page lists every key of the file of a game day. It is for engineers who write "
        "[game days](../gamedays.md); job, targets and limits are those of a [scenario](scenario.md).",
        GameDay,
    )


def _page(title: str, about: str, model: type[BaseModel]) -> str:
    schema = with_settings(model).model_json_schema(by_alias=True)
    parts = {model.__name__: schema, **{name: schema["$defs"][name] for name in _in_order(schema)}}
    return "\n".join([f"# {title}\n", f"{about}\n", *(_section(name, part) for name, part in parts.items())])


def _in_order(schema: Schema) -> list[str]:
    """The parts of a schema in the order in which they are first mentioned, from the outside in."""
    found: dict[str, None] = {}
    open_ = [schema]
    for part in open_:
        for name in _references(part.get("properties", {})):
            if name not in found:
                found[name] = None
                open_.append(schema["$defs"][name])
    return list(found)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        for part in value.values():
            yield from _references(part)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part)


def _section(name: str, part: Schema) -> str:
    required = part.get("required", ())
    rows = [
        (code(key), words(value), default(_default(value, key in required)), value.get("description", ""))
        for key, value in part["properties"].items()
    ]
    return f"## {name}\n\n{part.get('description', '')}\n\n{table(['key', 'takes', 'default', ''], rows)}"


def _default(value: Schema, required: bool) -> object:
    if required:
        return NOTHING
    said = value.get("default")
    seconds = "pattern" in value and isinstance(said, float)
    return f"{said:g}s" if seconds else said
