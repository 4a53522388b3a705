"""Sizes with units, such as 500MB, and their values in bytes."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic_core import core_schema

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
