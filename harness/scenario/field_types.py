"""The base class and the small types of all grammars (scenarios, game days and gates): sizes with units, such as 500MB,
regular expressions, and placeholders such as `{run}`, in which doubled braces stand for braces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import core_schema

NAME = r"^[a-z0-9][a-z0-9._-]*$"
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """Refuses unknown keys, and converts no values: `"3"` is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=False)


def _parse(value: object) -> str:
    try:
        return re.compile(str(value)).pattern
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from error


class _RegexSchema:
    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(_parse, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {"type": "string", "format": "regex"}


Regex = Annotated[str, _RegexSchema()]


_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]i?B|B)")


def parse_size(value: object) -> int:
    """The bytes of a size such as `5GB` or `512MiB`. Raises ValueError for anything else, also for a number without a
    unit."""
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = found and {"KB": "kB", "kiB": "KiB"}.get(found[2], found[2])
    if not found or unit not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write a number with a unit, such as 500MB, 2GiB or 1TB")
    return int(float(found[1]) * _UNITS[str(unit)])


def size_in_words(size: float) -> str:
    """A number of bytes with a suitable decimal unit, such as 1.5 GB."""
    for unit in ("TB", "GB", "MB", "kB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size:.0f} B"


class _SizeSchema:
    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_before_validator_function(parse_size, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {"type": "string", "examples": ["500MB", "2GiB"]}


Bytes = Annotated[int, _SizeSchema()]


PLACEHOLDERS = ("run", "jobs", "here", "python", "nvml")
ENDPOINT = "endpoint."  # {endpoint.NAME}: the address of an endpoint of the job, or of the proxy in front of it
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def unknown_placeholders(text: str, endpoints: Iterable[str] = ()) -> list[str]:
    """The names of placeholders that do not exist; single braces count as unknown placeholders too. `endpoints`: the
    names of the job's endpoints."""
    known = {*PLACEHOLDERS, *(ENDPOINT + name for name in endpoints)}
    found = [match for match in _BRACES.finditer(text) if match[0] not in ("{{", "}}")]
    return [match[1] or "" for match in found if match[1] not in known]


def with_braces_doubled(text: str) -> str:
    """The text for a scenario file, such that `fill` gives this text again. Placeholders stay as they are."""
    kept = {f"{{{name}}}" for name in PLACEHOLDERS}
    return _BRACES.sub(lambda match: match[0] if match[0] in kept else re.sub("[{}]", r"\g<0>\g<0>", match[0]), text)


def fill_some(text: str, values: Mapping[str, str]) -> str:
    """Replaces these placeholders by their values. The rest of the text stays, including doubled braces."""
    return _BRACES.sub(lambda match: values.get(match[1] or "", match[0]), text)


def fill_all(value: Any, values: Mapping[str, str]) -> Any:
    """Replaces these placeholders, as `fill_some` does, in all texts of plain data."""
    if isinstance(value, dict):
        return {key: fill_all(one, values) for key, one in value.items()}
    if isinstance(value, list):
        return [fill_all(one, values) for one in value]
    return fill_some(value, values) if isinstance(value, str) else value


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replaces placeholders by their values. Placeholders without a value stay. Doubled braces become single braces."""

    def replaced(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        return values.get(match[1] or "", match[0])

    return _BRACES.sub(replaced, text)
