"""The JSON Schema of scenario files, with the parameters of all installed plug-ins."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from torchaos.harness import registry
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.parameters import schema_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(model: type[BaseModel] = Scenario) -> dict[str, Any]:
    """The schema of scenarios, or of another type of file with the same parts. For editors: the parameters of
    assertions and conditions are in `properties`, those of injectors in `$defs`."""
    schema = model.model_json_schema(by_alias=True)
    keys, parts = schema["properties"], schema["$defs"]
    if "Item" in parts:
        parts["Item"] = _items_of("assertions")
    for key, group in (("steady_state", "conditions"), ("stop", "conditions"), ("assert", "assertions")):
        if key in keys:
            keys[key]["items"] = _items_of(group)
    if "launcher" in keys:
        keys["launcher"]["enum"] = list(registry.names("launchers"))
    if "twin" in keys:
        keys["twin"] = {"anyOf": [{"const": "none"}, {"$ref": "#/$defs/Twin"}]}
    for part in (parts[name] for name in ("Fault", "Risk") if name in parts):
        _name_injectors(part)
    return schema


def _name_injectors(fault: dict[str, Any]) -> None:
    injectors = registry.all_of("injectors")
    fault["properties"]["inject"]["enum"] = sorted(injectors)
    fault["properties"]["target"] = {"anyOf": [{"const": "all"}, {"$ref": "#/$defs/Target"}]}
    fault["allOf"] = [
        {"if": {"properties": {"inject": {"const": name}}}, "then": {"properties": {"with": schema_of(found)}}}
        for name, found in injectors.items()
    ]


def _items_of(group: str) -> dict[str, Any]:
    return {"anyOf": [_item_schema(name, found) for name, found in registry.all_of(group).items()]}


def _item_schema(name: str, found: Any) -> dict[str, Any]:
    about = (found.__doc__ or "").strip()
    options = [
        {"const": name},
        {"type": "object", "properties": {name: schema_of(found)}, "required": [name], "additionalProperties": False},
    ]
    return {"anyOf": options, "description": about}
