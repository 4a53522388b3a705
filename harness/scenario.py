"""Loads scenarios. Whatever is wrong with one is said all at once, each with its place and what to do about it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from torchaos.harness import registry
from torchaos.harness.contracts import UsageError
from torchaos.harness.grammar import Scenario
from torchaos.harness.probes.log_adapters import adapter_for
from torchaos.harness.yaml_source import Keys, Problem, ScenarioError, Source, read, value_of

PLACEHOLDERS = ("run", "jobs", "here", "python")
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
Tell = Callable[..., None]  # the place, the text, and whether the key is meant rather than its value
# What pydantic calls a thing is not what a person calls it.
_EXPECTED = {
    "int_type": "a whole number", "string_type": "text; put it in quotes", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "a mapping", "model_type": "a mapping",
    "model_attributes_type": "a mapping", "dataclass_type": "a mapping",
}  # fmt: skip


def load(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Raises ScenarioError, a line per problem: `file:line:column: what; what to do`."""
    source = read(path)
    set_in_file = [_override(source, text) for text in overrides]
    problems: list[Problem] = []

    def tell(keys: Keys, text: str, key: bool = False) -> None:
        by_hand = next((".".join(map(str, at)) for at in set_in_file if keys[: len(at)] == at), None)
        problems.append(Problem(source.place(keys, key), f"--set {by_hand}: {text}" if by_hand else text))

    scenario = _typed(source, tell)
    if scenario is not None:
        for check in (_check_job, _check_faults, _check_items, _check_placeholders):
            check(scenario, tell)
    if problems or scenario is None:
        raise ScenarioError(path, problems)
    return scenario


def _override(source: Source, text: str) -> Keys:
    """Put `key.sub=value` into the data; the grammar then judges it like all the rest."""
    dotted, equals, raw = text.partition("=")
    keys: Keys = tuple(int(part) if part.isdigit() else part for part in dotted.split("."))
    if not equals or not all(part != "" for part in keys):
        raise UsageError(f"--set {text}: write KEY=VALUE, such as job.timeout=2m or faults.0.when.step=30")
    try:
        value, holder = value_of(raw), source.data
        for part in keys[:-1]:
            holder = holder.setdefault(part, {}) if isinstance(holder, dict) else holder[part]  # type: ignore[index]
        holder[keys[-1]] = value  # type: ignore[index]
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        raise UsageError(
            f"--set {text}: the scenario has no place for it; see its keys, and quote text that YAML reads otherwise"
        ) from None
    return keys


def _typed(source: Source, tell: Callable[..., None]) -> Scenario | None:
    try:
        return Scenario.model_validate(source.data)
    except ValidationError as error:
        for keys, found in _most_telling(source, error).items():
            tell(keys, _words(found, keys), key=found["type"] == "extra_forbidden")
        return None


def _most_telling(source: Source, error: ValidationError) -> dict[Keys, Any]:
    """One error per place: where a value may be several things, that of the thing it was meant to be."""
    best: dict[Keys, Any] = {}
    for found in error.errors():
        keys = _in_file(source, tuple(found["loc"]), found["type"])
        if keys not in best or _rank_of(found) > _rank_of(best[keys]):
            best[keys] = found
    return best


def _rank_of(found: Any) -> int:
    return 0 if found["type"] in _EXPECTED else 1 if found["type"] == "literal_error" else 2


def _in_file(source: Source, loc: Keys, kind: str) -> Keys:
    """Pydantic's location without the parts that the file does not have (union members, normalised items)."""
    keys: Keys = ()
    for part in loc:
        if (*keys, part) in source.values or (*keys, part) in source.keys:
            keys = (*keys, part)
    if kind in ("missing", "extra_forbidden") and keys[-1:] != loc[-1:]:  # not in the file, or put in by --set
        return (*keys, loc[-1])
    return keys


def _words(found: Any, keys: Keys) -> str:
    kind, name = found["type"], next((key for key in reversed(keys) if isinstance(key, str)), "scenario")
    if kind == "extra_forbidden":
        known = _keys_beside(found["loc"])
        near = registry.suggest(name, known)
        return f"unknown key {name!r}; {f'did you mean {near!r}?' if near else 'there are ' + ', '.join(known)}"
    if kind == "missing":
        return f"the key {found['loc'][-1]!r} is missing; add it"
    if kind == "value_error":
        return str(found["ctx"]["error"])
    if kind in ("literal_error", "enum"):
        near = registry.suggest(str(found["input"]), re.findall(r"'([^']*)'", found["ctx"]["expected"]))
        return f"{name} is {found['ctx']['expected']}, not {found['input']!r}" + (
            f"; did you mean {near!r}?" if near else ""
        )
    if kind == "string_pattern_mismatch":
        return f"{name} is made of small letters, digits, dots and dashes, not {found['input']!r}"
    if kind in _EXPECTED:
        return f"{name} is {_EXPECTED[kind]}, not {_shown(found['input'])}"
    return f"{name}: {found['msg'][:1].lower()}{found['msg'][1:]}, not {_shown(found['input'])}"


def _shown(value: Any) -> str:
    words = {None: "empty", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return {dict: "a mapping", list: "a list"}.get(type(value)) or repr(value)


def _keys_beside(loc: Keys) -> list[str]:
    """The keys that the grammar knows where the unknown one stands."""
    model: Any = Scenario
    for part in loc[:-1]:
        if isinstance(part, str):
            model = next((found for found in _models_in(model, part)), model)
    return sorted(field.alias or name for name, field in model.model_fields.items())


def _models_in(model: Any, key: str) -> Iterator[Any]:
    for name, field in model.model_fields.items():
        if (field.alias or name) == key or name == key:
            yield from _find_models(field.annotation)


def _find_models(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "model_fields"):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _find_models(argument)


def _check_faults(scenario: Scenario, tell: Tell) -> None:
    earlier: list[str] = []
    for number, fault in enumerate(scenario.faults):
        at: Keys = ("faults", number)
        name = fault.id or fault.inject
        if name in earlier:
            tell(
                (*at, "id") if fault.id else (*at, "inject"),
                f"there is a fault {name!r} already; give this one an id of its own",
            )
        if fault.when.after is not None and fault.when.after not in earlier:
            near = registry.suggest(fault.when.after, earlier)
            hint = f"did you mean {near!r}?" if near else f"the earlier ones are {', '.join(earlier) or 'none'}"
            tell((*at, "when", "after"), f"there is no earlier fault {fault.when.after!r}; {hint}")
        earlier.append(name)
        injector = _class("injectors", fault.inject, (*at, "inject"), tell)
        if injector is not None:
            check_parameters(injector, fault.with_, (*at, "with"), tell)
            if fault.for_ is not None and injector.lethal:
                tell((*at, "for"), f"{fault.inject} can't be taken back, so `for` has no meaning; remove it")


def _check_items(scenario: Scenario, tell: Tell) -> None:
    groups: list[tuple[str, str, Any]] = [
        ("assert", "assertions", scenario.assert_),
        ("steady_state", "conditions", scenario.steady_state),
        ("stop", "conditions", scenario.stop),
    ]
    for key, group, items in groups:
        seen: set[str] = set()
        for number, item in enumerate(items):
            at: Keys = (key, number)
            if item.name in seen:
                tell(at, f"{item.name} stands here a second time; put its bounds together")
            seen.add(item.name)
            found = _class(group, item.name, at, tell)
            if found is not None:
                check_parameters(found, item.params, (*at, item.name), tell)
    _class("launchers", scenario.launcher, ("launcher",), tell)


def _class(group: str, name: str, at: Keys, tell: Tell) -> Any:
    try:
        return registry.find(group, name)
    except UsageError as error:
        tell(at, str(error))
        return None


def check_parameters(found: Any, given: Mapping[str, Any], at: Keys, tell: Tell) -> dict[str, Any]:
    """The parameters of a plug-in, typed by its dataclass fields; tells of those that don't fit."""
    known = {field.name: field for field in fields(found) if field.init}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            near = registry.suggest(name, known)
            there = f"it has {', '.join(known)}" if known else "it has none"
            hint = f"did you mean {near!r}?" if near else there
            tell((*at, name), f"{found.name} has no parameter {name!r}; {hint}", True)
            continue
        hint = eval(str(known[name].type), vars(sys.modules[found.__module__]))  # the class's own annotation
        try:
            values[name] = TypeAdapter(hint).validate_python(value, strict=True)
        except ValidationError as error:
            tell((*at, name), _words(error.errors()[0], (*at, name)))
    for name, field in known.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            tell(at, f"{found.name} needs the parameter {name!r}; add it")
    return values


def _check_job(scenario: Scenario, tell: Tell) -> None:
    job = scenario.job
    try:
        words = shlex.split(job.command) if isinstance(job.command, str) else job.command
    except ValueError as error:
        return tell(("job", "command"), f"the command can't be split into words: {str(error).lower()}; mend its quotes")
    if not words:
        tell(("job", "command"), "the command is empty; write the torchrun command line")
    elif "=" in words[0]:
        tell(("job", "command"), f"no shell reads the command, so {words[0]!r} is not set; put it under env")
    elif isinstance(job.command, str) and (shell := [word for word in words if word in ("&&", "||", "|", ";", ">", "<", "&")]):
        tell(("job", "command"), f"no shell reads the command, so {shell[0]!r} means nothing; write [bash, -c, '...']")
    for name in job.env:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            tell(("job", "env", name), f"{name!r} is no name of a variable; use letters, digits and _", True)
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
        for name in unknown_placeholders(text):
            near = registry.suggest(name, PLACEHOLDERS)
            hint = (
                f"did you mean {{{near}}}?" if near else f"there are {', '.join(f'{{{one}}}' for one in PLACEHOLDERS)}"
            )
            tell(keys, f"unknown placeholder {{{name}}}; {hint} A brace itself is written twice")


def unknown_placeholders(text: str) -> list[str]:
    found = [match for match in _BRACES.finditer(text) if match[0] not in ("{{", "}}")]
    return [match[1] or "" for match in found if match[1] not in PLACEHOLDERS]


def fill(text: str, values: Mapping[str, str]) -> str:
    """Put values in for placeholders; those that have none here stay, doubled braces become single ones."""

    def one(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        return values.get(match[1] or "", match[0])

    return _BRACES.sub(one, text)


def json_schema() -> dict[str, Any]:
    """For editors. The parameters of each injector, assertion and condition are described in `$defs`."""
    schema = Scenario.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for key, group in (("assert", "assertions"), ("steady_state", "conditions"), ("stop", "conditions")):
        schema["properties"][key]["items"] = {
            "anyOf": [_item_schema(name, found) for name, found in registry.all_of(group).items()]
        }  # type: ignore[arg-type]
    injectors = registry.all_of("injectors")
    schema["$defs"]["Fault"]["properties"]["inject"]["enum"] = sorted(injectors)
    schema["$defs"]["Fault"]["allOf"] = [
        {"if": {"properties": {"inject": {"const": name}}}, "then": {"properties": {"with": _parameters(found)}}}
        for name, found in injectors.items()
    ]
    schema["$defs"]["Fault"]["properties"]["target"] = {"anyOf": [{"const": "all"}, {"$ref": "#/$defs/Target"}]}
    schema["properties"]["twin"] = {"anyOf": [{"const": "none"}, {"$ref": "#/$defs/Twin"}]}
    return schema


def _item_schema(name: str, found: Any) -> dict[str, Any]:
    about = (found.__doc__ or "").strip()
    options = [
        {"const": name},
        {"type": "object", "properties": {name: _parameters(found)}, "required": [name], "additionalProperties": False},
    ]
    return {"anyOf": options, "description": about}


def _parameters(found: Any) -> dict[str, Any]:
    properties = {}
    for field in fields(found):
        if field.init:
            hint = eval(str(field.type), vars(sys.modules[found.__module__]))
            properties[field.name] = TypeAdapter(hint).json_schema()
    return {"type": "object", "properties": properties, "additionalProperties": False}
