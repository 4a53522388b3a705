"""The JSON Schema of scenario files, with the parameters of all installed plug-ins."""

from __future__ import annotations

from typing import Any

from torchaos.harness import registry
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.parameters import schema_of


def json_schema() -> dict[str, Any]:
    """The schema, for editors. Parameters of assertions and conditions are in `properties`, of injectors in `$defs`."""
    schema = Scenario.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for key, group in (("assert", "assertions"), ("steady_state", "conditions"), ("stop", "conditions")):
        schema["properties"][key]["items"] = {
            "anyOf": [_item_schema(name, found) for name, found in registry.all_of(group).items()]
        }
    schema["properties"]["launcher"]["enum"] = list(registry.names("launchers"))
    injectors = registry.all_of("injectors")
    schema["$defs"]["Fault"]["properties"]["inject"]["enum"] = sorted(injectors)
    schema["$defs"]["Fault"]["allOf"] = [
        {"if": {"properties": {"inject": {"const": name}}}, "then": {"properties": {"with": schema_of(found)}}}
        for name, found in injectors.items()
    ]
    schema["$defs"]["Fault"]["properties"]["target"] = {"anyOf": [{"const": "all"}, {"$ref": "#/$defs/Target"}]}
    schema["properties"]["twin"] = {"anyOf": [{"const": "none"}, {"$ref": "#/$defs/Twin"}]}
    return schema


def _item_schema(name: str, found: Any) -> dict[str, Any]:
    about = (found.__doc__ or "").strip()
    options = [
        {"const": name},
        {"type": "object", "properties": {name: schema_of(found)}, "required": [name], "additionalProperties": False},
    ]
    return {"anyOf": options, "description": about}
