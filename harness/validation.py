"""Plain data against a pydantic model, with what is wrong told as Problems: one for each place."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from torchaos.harness.problems import Path, Problem, either, name_of, show
from torchaos.harness.registry import suggest

Model = TypeVar("Model", bound=BaseModel)

# What a value should have been, by the type of pydantic's error; {} are filled from its context.
_WANTED = {
    "string_type": "text", "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "float_parsing": "a number", "finite_number": "a finite number", "bool_type": "true or false",
    "bool_parsing": "true or false", "list_type": "a list", "tuple_type": "a list", "set_type": "a list",
    "frozen_set_type": "a list", "dict_type": "a mapping", "mapping_type": "a mapping", "model_type": "a mapping",
    "model_attributes_type": "a mapping", "dataclass_type": "a mapping", "none_required": "nothing",
    "greater_than_equal": "{ge} or more", "greater_than": "more than {gt}", "less_than_equal": "{le} or less",
    "less_than": "less than {lt}", "too_short": "at least {min_length} of them", "too_long": "at most {max_length} of them",
    "string_too_short": "at least {min_length} characters", "string_too_long": "at most {max_length} characters",
    "enum": "{expected}", "literal_error": "{expected}",
}  # fmt: skip
_SENTENCES = ("refused", "value_error", "assertion_error")


def validate(model: type[Model], data: Any, path: Path = ()) -> tuple[Model | None, list[Problem]]:
    """`path` is where `data` stands in the scenario. Strict: text is no number, and a number no text."""
    try:
        # As JSON, since lists, enumerations and the like are then taken for what they stand for, though it is strict.
        return model.model_validate_json(json.dumps(data), strict=True), []
    except ValidationError as error:
        found = error.errors(include_url=False)
        return None, [
            Problem((*path, *one.path), one.what, one.at_key, one.text) for one in _Errors(model, data, found)
        ]


class _Errors:
    """Errors of one validation. Those that stand in one place (the members of a union) become one problem."""

    def __init__(self, model: type[BaseModel], data: Any, errors: Sequence[ErrorDetails]) -> None:
        self._model, self._data = model, data
        self._errors = [(self._path(error), error) for error in errors]

    def __iter__(self) -> Iterator[Problem]:
        unknown = {(path[:-1], path[-1]) for path, error in self._errors if error["type"] == "extra_forbidden"}
        places: dict[tuple[Path, str], list[ErrorDetails]] = {}
        for path, error in self._errors:
            kind, last = error["type"], str(error["loc"][-1]) if error["loc"] else ""
            if kind == "extra_forbidden":
                yield self._unknown(path)
            elif kind == "missing":
                # A key that is merely misspelt is told of once, as an unknown one.
                if not any(at == path and suggest(str(key), [last]) for at, key in unknown):
                    yield Problem(path, f"{name_of(path)} lacks {last!r}; add it")
            elif not self._other_member(path, error):
                single = kind in _SENTENCES
                places.setdefault((path, error["msg"] if single else ""), []).append(error)
        for (path, _), together in places.items():
            yield _wrong(path, together)

    def _path(self, error: ErrorDetails) -> Path:
        """The part of pydantic's location that leads through the data; names of union members are passed over."""
        path: list[str | int] = []
        at = self._data
        for part in error["loc"]:
            if isinstance(at, dict) and part in at:
                at = at[str(part)]
            elif isinstance(at, list) and isinstance(part, int) and part < len(at):
                at = at[part]
            else:
                continue
            path.append(part)
        return tuple(path)

    def _other_member(self, path: Path, error: ErrorDetails) -> bool:
        """Whether another member of the union fits the value's kind, and says itself what is wrong inside it."""
        if not error["loc"] or (path and error["loc"][-1] == path[-1]):
            return False
        return any(
            (len(other) > len(path) and other[: len(path)] == path) or (other == path and one["type"] in ("missing", *_SENTENCES))
            for other, one in self._errors
            if one is not error
        )

    def _unknown(self, path: Path) -> Problem:
        known = _keys(self._model, path[:-1])
        near = suggest(str(path[-1]), known)
        advice = f"did you mean {near!r}?" if near else f"use {', '.join(known) or 'none: it has no parameters'}"
        within = f" in {name_of(path[:-1])}" if len(path) > 1 else ""
        return Problem(path, f"there is no key {show(str(path[-1]))}{within}; {advice}", at_key=True)


def _wrong(path: Path, errors: Sequence[ErrorDetails]) -> Problem:
    error, name = errors[0], name_of(path)
    context = error.get("ctx", {})
    if error["type"] == "refused":
        at = context["at"]
        return Problem((*path, at) if at else path, str(context["what"]), bool(at), str(context["text"]))
    if error["type"] in _SENTENCES:
        return Problem(path, f"{name}: {error['msg'].partition(', ')[2] or error['msg']}")
    value = error["input"]
    wanted = [_wanted(one) for one in errors]
    words = [word for one in errors for word in _words(one)]
    near = suggest(value, words) if isinstance(value, str) else None
    quotes = ", in quotes" if wanted == ["text"] and not isinstance(value, str) else ""
    meant = f"did you mean {near!r}? " if near else ""
    return Problem(path, f"{name} is {show(value)}; {meant}write {either(wanted)}{quotes}")


def _wanted(error: ErrorDetails) -> str:
    template = _WANTED.get(error["type"])
    if template is None:
        return f"something else: {error['msg'][:1].lower()}{error['msg'][1:]}"
    return template.format(**error.get("ctx", {}))


def _words(error: ErrorDetails) -> list[str]:
    """The words that an enumeration allows."""
    return [part for part in str(error.get("ctx", {}).get("expected", "")).split("'")[1::2]]


def _keys(model: type[BaseModel], path: Path) -> list[str]:
    """The keys that the mapping at `path` may have."""
    at: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, str) and at is not None:
            fields = {field.alias or name: field.annotation for name, field in at.model_fields.items()}
            at = next(_models(fields.get(part)), None)
    return [field.alias or name for name, field in at.model_fields.items()] if at else []


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models(argument)
