"""The parameters of injectors, assertions, conditions and launchers: the fields of their dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, create_model

from torchaos.harness.contracts import UsageError
from torchaos.harness.problems import Path, Problem, name_of
from torchaos.harness.validation import validate

_PREFIX = "p_"  # keeps parameters such as `copy` or `json` apart from pydantic's own names


def read(cls: type[Any], given: Any, path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """What the scenario gives, as JSON values that the class takes: durations are seconds by then.

    Only what was given is in it; the rest are the class's defaults. Raises UsageError where the class can't say what
    its parameters are.
    """
    model, problems = validate(model_of(cls), given, path)
    if model is None:
        return {}, problems
    try:
        cls(**{name.removeprefix(_PREFIX): getattr(model, name) for name in model.model_fields_set})
    except (ValueError, TypeError) as error:  # what __post_init__ refuses
        return {}, [Problem(path, f"{name_of(path)}: {error}")]
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True), []


def json_schema(cls: type[Any]) -> dict[str, Any]:
    """JSON Schema of the parameters, with the first paragraph of the class's docstring as its description."""
    schema = model_of(cls).model_json_schema(by_alias=True)
    schema.pop("title", None)
    for one in schema.get("properties", {}).values():
        one.pop("title", None)
    about = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    return {**schema, "description": " ".join(about.split())}


def model_of(cls: type[Any]) -> type[BaseModel]:
    """A pydantic model with the fields of the dataclass. Raises UsageError where a type can't be resolved."""
    fields: dict[str, Any] = {}
    try:
        for field in dataclasses.fields(cls):
            if field.init:
                fields[_PREFIX + field.name] = (_type(cls, field), _default(field))
        return create_model(cls.__name__, __config__=_CONFIG, **fields)
    except (NameError, AttributeError, TypeError, PydanticUserError) as error:
        raise UsageError(
            f"{cls.__module__}.{cls.__qualname__}: the types of its parameters can't be resolved: {error}; "
            f"import them when the module is loaded"
        ) from error


_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=False)


def _type(cls: type[Any], field: dataclasses.Field[Any]) -> Any:
    """Evaluated alone, since other annotations of a class may be there for type checkers only."""
    owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
    alone = SimpleNamespace(__annotations__={field.name: field.type})
    return typing.get_type_hints(alone, vars(sys.modules[owner.__module__]), include_extras=True)[field.name]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory, alias=field.name)
    return Field(... if field.default is dataclasses.MISSING else field.default, alias=field.name)
