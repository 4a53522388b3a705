"""The parameters of plug-ins (the fields of their dataclasses, with their annotated types), and the JSON Schema of
scenario files, which has those of all installed plug-ins. The parameters of launchers are keys of a scenario's job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from inspect import get_annotations
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from torchaos.harness import registry
from torchaos.harness.base_classes import DRAWN
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.scenario.grammar import Job, Scenario
from torchaos.harness.scenario.mistakes import words
from torchaos.harness.scenario.yaml_source import Keys

# Reports a mistake: its place, a text, whether the key is wrong (False: its value). `also`: other places that the
# mistake is about; `texts`: the places of numbers that may be meant as text.
Tell = Callable[..., None]


def check_parameters(found: Any, given: Mapping[str, Any], at: Keys, tell: Tell) -> dict[str, Any]:
    """The parameters of a plug-in, converted to their types. `found`: its class; `at`: their place in the file. Each
    mistake goes to `tell`: an unknown, wrong or missing parameter, or a value for which the plug-in's own
    `__post_init__` raises an error."""
    known = {field.name: field for field in parameters_of(found)}
    values: dict[str, Any] = {}
    mistakes: list[tuple[Any, ...]] = []
    for name, value in given.items():
        if name not in known:
            near = registry.suggest(name, known)
            there = f"it has {', '.join(known)}" if known else "it has none"
            hint = f"did you mean {near!r}?" if near else there
            mistakes.append(((*at, name), f"{found.name} has no parameter {name!r}; {hint}", True))
            continue
        try:
            values[name] = _type(found, known[name]).validate_python(value, strict=True)
        except ValidationError as error:
            found_at = [((*at, name, *one["loc"]), one["type"]) for one in error.errors()]
            texts = [keys for keys, kind in found_at if kind == "string_type"]
            mistakes.append(((*at, name), words(error.errors()[0], (*at, name)), False, (), texts))
    for name, field in known.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            mistakes.append((at, f"{found.name} needs the parameter {name!r}; add it"))
    if not mistakes:
        try:
            found(**values)
        except (ValueError, ChaosError) as error:
            mistakes.append((at, f"{found.name}: {error}"))
        except Exception as error:  # another package's code may raise anything
            mistakes.append((at, f"{found.name}: its own check failed: {type(error).__name__}: {error}"))
    for mistake in mistakes:
        tell(*mistake)
    return values


def parameters_of(found: Any) -> list[Field[Any]]:
    """The fields that a scenario may set; fields that the planner fills, as with random choices, are left out."""
    return [field for field in _fields(found) if not field.metadata.get(DRAWN)]


def made(found: Any, params: Mapping[str, Any]) -> Any:
    """The plug-in with these parameters, which are JSON, as in a plan."""
    own = (field for field in _fields(found) if field.name in params)
    return found(**{field.name: _type(found, field).validate_python(params[field.name]) for field in own})


def params_of(plugin: Any) -> dict[str, Any]:
    """The parameters of a plug-in as JSON, for a plan."""
    return {field.name: to_jsonable_python(getattr(plugin, field.name)) for field in _fields(plugin)}


def _fields(plugin: Any) -> list[Field[Any]]:
    return [field for field in fields(plugin) if field.init] if is_dataclass(plugin) else []


Model = TypeVar("Model", bound=BaseModel)


def with_settings(model: type[Model]) -> type[Model]:
    """The type of a file, such as `Scenario`, with the parameters of all launchers as keys of its job. Raises
    UsageError if two parameters have the same name."""
    found: type[Model] = _with_settings(model, registry.names("launchers")) if "job" in model.model_fields else model
    return found


@cache
def _with_settings(model: Any, launchers: tuple[str, ...]) -> Any:
    keys: dict[str, Any] = {}
    for name in launchers:
        try:
            found = registry.find("launchers", name)
        except UsageError:  # it can't be loaded, which is reported if a scenario names it
            continue
        for one in parameters_of(found):
            key = (_annotation(found, one), _default_of(one))
            if one.name in Job.model_fields or repr(keys.setdefault(one.name, key)) != repr(key):
                raise UsageError(f"launcher {name!r}: job has another key {one.name!r}; rename the parameter")
    job: Any = create_model("Job", __base__=Job, __doc__=Job.__doc__, **keys)
    of_file: Any = (Annotated[job, FieldInfo(description=model.model_fields["job"].description)], ...)
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, job=of_file)


def _default_of(parameter: Field[Any]) -> Any:
    """The default of a key. A key that one launcher needs is optional for the others."""
    if parameter.default_factory is not MISSING:
        return FieldInfo(default_factory=parameter.default_factory)
    return None if parameter.default is MISSING else parameter.default


def schema_of(found: Any) -> dict[str, Any]:
    """The JSON Schema of a plug-in's parameters."""
    properties = {field.name: _type(found, field).json_schema() for field in parameters_of(found)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _type(found: Any, field: Field[Any]) -> TypeAdapter[Any]:
    """The type of a field, from its annotation. The annotation is evaluated in the module of the class that declares
    the field. Other annotations are not evaluated, because they may name types that are imported for type checkers
    only."""
    return TypeAdapter(_annotation(found, field))


def _annotation(found: Any, field: Field[Any]) -> Any:
    own = next(owner for owner in found.__mro__ if field.name in get_annotations(owner))
    return eval(str(field.type), vars(sys.modules[own.__module__]))


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(model: type[BaseModel] = Scenario) -> dict[str, Any]:
    """The schema of scenarios, or of another type of file with the same parts. For editors: the parameters of
    assertions and conditions are in `properties`, those of injectors in `$defs`."""
    schema = with_settings(model).model_json_schema(by_alias=True)
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
