"""Reads dataclasses from their JSON, and checks every value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

Shape = TypeVar("Shape")

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def read_as(shape: type[Shape], text: bytes | str) -> Shape:
    """Reads the dataclass from a JSON text. Raises ValueError, on one line, if the text is not JSON, or if a value is
    missing or has another type."""
    try:
        found: Shape = _adapter(shape).validate_json(text, strict=True)
        return found
    except ValidationError as error:
        raise ValueError(_in_words(error)) from None


def made_as(shape: type[Shape], raw: Mapping[str, Any]) -> Shape:
    """Makes the dataclass from JSON that was already parsed. Less strict than `read_as`: the number 1 may be given as
    the text "1". Raises ValueError."""
    try:
        found: Shape = _adapter(shape).validate_python(raw)
        return found
    except ValidationError as error:
        raise ValueError(_in_words(error)) from None


def _in_words(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]
