"""Checks a scenario beyond the types of its keys: its parts must fit each other and the plug-ins that it names. Also
the parameters of plug-ins (the fields of their dataclasses, with their annotated types), and the JSON Schema of
scenario files, which has those of all installed plug-ins. The parameters of launchers are keys of a scenario's job."""

from __future__ import annotations

import re
import shlex
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
from torchaos.harness.monitoring.probes.log_adapters import adapter_for
from torchaos.harness.scenario.field_types import ENDPOINT, PLACEHOLDERS, unknown_placeholders
from torchaos.harness.scenario.grammar import Fault, Job, Scenario
from torchaos.harness.scenario.validation_errors import words
from torchaos.harness.scenario.yaml_source import Keys

# Reports a mistake: its place, a text, and whether the key is wrong (False: its value). `also`: other places that the
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


_NO_RANKS = ("files", "endpoints")
_SHELL = ("&&", "||", "|", ";", ">", "<", "&")


def check(scenario: Scenario, tell: Tell) -> None:
    for part in (_check_job, _check_placeholders, _check_faults, _check_items):
        part(scenario, tell)


def _check_job(scenario: Scenario, tell: Tell) -> None:
    job = scenario.job
    try:
        words = shlex.split(job.command) if isinstance(job.command, str) else job.command
    except ValueError as error:
        tell(("job", "command"), f"the command can't be split into words: {str(error).lower()}; correct its quotes")
        return
    if not words:
        tell(("job", "command"), "the command is empty; write the torchrun command line")
    elif "=" in words[0]:
        tell(("job", "command"), f"no shell reads the command, so {words[0]!r} is not set; put it under env")
    elif isinstance(job.command, str) and (shell := [word for word in words if word in _SHELL]):
        tell(("job", "command"), f"no shell reads the command, so {shell[0]!r} means nothing; write [bash, -c, '...']")
    for name in job.env:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            tell(("job", "env", name), f"{name!r} can't be the name of a variable; use letters, digits and _", True)
    try:
        adapter_for(job.log.model_dump() if job.log else None)
    except UsageError as error:
        tell(("job", "log"), str(error))


def _check_placeholders(scenario: Scenario, tell: Tell) -> None:
    job = scenario.job
    texts: list[tuple[Keys, str]] = [(("job", "cwd"), job.cwd)]
    if isinstance(job.command, str):
        texts.append((("job", "command"), job.command))
    else:
        texts += [(("job", "command", number), word) for number, word in enumerate(job.command)]
    texts += [(("job", "env", name), value) for name, value in job.env.items()]
    if job.checkpoints:
        texts.append((("job", "checkpoints", "path"), job.checkpoints.path))
    for keys, text in texts:
        for name in unknown_placeholders(text, job.endpoints):
            near = registry.suggest(name, PLACEHOLDERS)
            known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            hint = f"did you mean {{{near}}}?" if near else f"there are {known}."
            tell(keys, f"unknown placeholder {{{name}}}; {hint} To write a brace, double it")


def _check_faults(scenario: Scenario, tell: Tell) -> None:
    earlier: list[str] = []
    for number, fault in enumerate(scenario.faults):
        at: Keys = ("faults", number)
        name = fault.id or fault.inject
        if name in earlier:
            tell(
                (*at, "id") if fault.id else (*at, "inject"),
                f"there is a fault {name!r} already; give this fault another id",
            )
        if fault.when.after is not None and fault.when.after not in earlier:
            near = registry.suggest(fault.when.after, earlier)
            hint = f"did you mean {near!r}?" if near else f"the earlier ones are {', '.join(earlier) or 'none'}"
            names = [("faults", one, key) for one in range(number) for key in ("id", "inject")]
            tell((*at, "when", "after"), f"there is no earlier fault {fault.when.after!r}; {hint}", False, names)
        earlier.append(name)
        injector = _class("injectors", fault.inject, (*at, "inject"), tell)
        if injector is not None:
            _check_use(injector, scenario, fault, at, tell)


def _check_use(injector: Any, scenario: Scenario, fault: Fault, at: Keys, tell: Tell) -> None:
    """Checks what the scenario gives to the injector of a fault."""
    check_parameters(injector, fault.with_, (*at, "with"), tell)
    if fault.target is None and injector.hits not in _NO_RANKS:
        tell((*at, "target"), f"the key 'target' is missing here; write what {fault.inject} hits")
    elif fault.target is not None and injector.hits in _NO_RANKS:
        tell((*at, "target"), f"{fault.inject} hits {injector.hits}, not ranks; remove target", True)
    if injector.own_disk and not (scenario.job.checkpoints and scenario.job.checkpoints.size):
        text = f"{fault.inject} fills the file system that job.checkpoints.size makes; add that key, such as size: 64MB"
        tell((*at, "inject"), text, False, [("job", "checkpoints")])
    if injector.hits == "endpoints":
        _check_endpoint(scenario, fault.with_.get("endpoint"), (*at, "with"), tell)
    lasting = "node" in injector.where or injector.lasting
    if fault.for_ is not None and not lasting:
        tell((*at, "for"), f"{fault.inject} ends by itself; remove `for`, see its parameters")
    elif fault.for_ is not None and injector.lethal:
        tell((*at, "for"), f"{fault.inject} can't be undone, so `for` has no meaning; remove it")


def _check_endpoint(scenario: Scenario, name: object, at: Keys, tell: Tell) -> None:
    """Checks that the endpoint is in job.endpoints, and that the job uses the address of the proxy in front of it."""
    job = scenario.job
    if name not in job.endpoints:
        near = registry.suggest(str(name), job.endpoints)
        hint = f"did you mean {near!r}?" if near else "name it there, as host:port"
        text = f"job.endpoints has no {name or 'endpoint'!r}; {hint}"
        tell((*at, "endpoint") if name else at, text, False, [("job", "endpoints")])
        return
    words = [job.command] if isinstance(job.command, str) else job.command
    used = any(f"{{{ENDPOINT}{name}}}" in text for text in [*words, *job.env.values()])
    launcher = _class("launchers", scenario.launcher, ("launcher",), lambda *_, **__: None)  # another check reports it
    if not used and not (name == "rendezvous" and (launcher is None or launcher.sets_rendezvous)):
        tell(
            (*at, "endpoint"),
            f"the job does not use the proxy in front of {name}; in its command or env, write {{{ENDPOINT}{name}}} in "
            f"place of {job.endpoints[str(name)]}",
            False,
            [("job", "command"), ("job", "env"), ("job", "endpoints")],
        )


def _check_items(scenario: Scenario, tell: Tell) -> None:
    groups: list[tuple[str, str, Any]] = [
        ("assert", "assertions", scenario.assert_),
        ("steady_state", "conditions", scenario.steady_state),
        ("stop", "conditions", scenario.stop),
        ("until", "conditions", scenario.until),
    ]
    for key, group, items in groups:
        seen: set[str] = set()
        for number, item in enumerate(items):
            at: Keys = (key, number)
            if item.name in seen:
                tell(at, f"{item.name} occurs here a second time; write it once, with all its parameters")
            seen.add(item.name)
            found = _class(group, item.name, at, tell)
            if found is not None:
                check_parameters(found, item.params, (*at, item.name), tell)
    launcher = _class("launchers", scenario.launcher, ("launcher",), tell)
    if launcher is not None:
        own = {one.name for one in parameters_of(launcher)} & scenario.job.model_fields_set
        check_parameters(launcher, {name: scenario.job.settings[name] for name in own}, ("job",), tell)
    _check_end(scenario, tell)


def _check_end(scenario: Scenario, tell: Tell) -> None:
    """Checks what else a scenario with `until` says. Such a run ends before the job does, so it can't be compared with
    a twin, and `completed` can't hold."""
    if not scenario.until:
        return
    if scenario.twin.runs:
        text = "a run that until ends is not a whole job, so it can't be compared; add twin: none"
        tell(("until",), text, True, [("twin",)])
    for number, item in enumerate(scenario.assert_):
        if item.name == "completed":
            text = "until ends the run before the job is done; remove completed, or until"
            tell(("assert", number), text, False, [("until",)])


def _class(group: str, name: str, at: Keys, tell: Tell) -> Any:
    try:
        return registry.find(group, name)
    except UsageError as error:
        tell(at, str(error))
        return None
