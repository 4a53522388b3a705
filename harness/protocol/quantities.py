"""The types of parameters in injectors and scenarios. Standard library only, because injectors are loaded in ranks."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Any

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(value: object) -> float:
    """The seconds in a text such as `90s`, `1m30s` or `250ms`. Raises ValueError for any other text, also if the unit
    is missing."""
    text = str(value).strip()
    if text == "0" and not isinstance(value, bool):
        return 0.0
    if not isinstance(value, str) or not re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        raise ValueError(f"{value!r} is not a duration; write a number with a unit, such as 250ms, 30s, 5m or 1h30m")
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))


class _DurationSchema:
    """Lets pydantic read fields of the type `Seconds`. pydantic itself is not imported here."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(parse_duration, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {"type": "string", "pattern": f"^(0|({_DURATION.pattern})+)$", "examples": ["30s", "5m"]}


Seconds = Annotated[float, _DurationSchema()]


class _Limits:
    """The bounds of a number, under the names that pydantic uses."""

    def __init__(self, **limits: float) -> None:
        self._limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), **self._limits}


Count = Annotated[int, _Limits(ge=1)]
Size = Annotated[int, _Limits(ge=0)]
Share = Annotated[float, _Limits(ge=0.0, lt=1.0)]
Positive = Annotated[float, _Limits(gt=0.0)]


DRAWN = "drawn"


def drawn() -> Any:
    """A field that `plan` fills and that a scenario must not give, such as the ranks of the target."""
    return field(default=(), metadata={DRAWN: True})
