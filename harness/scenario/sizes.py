"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic_core import core_schema

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]i?B|B)")


def parse_size(value: object) -> int:
    """Bytes from `5GB`, `512MiB`; a number without a unit is refused. Raises ValueError."""
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = found and {"KB": "kB", "kiB": "KiB"}.get(found[2], found[2])
    if not found or unit not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write a number with a unit, such as 500MB, 2GiB or 1TB")
    return int(float(found[1]) * _UNITS[str(unit)])


def size_in_words(size: float) -> str:
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
