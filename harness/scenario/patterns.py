"""The type of a regular expression in a scenario."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic_core import core_schema


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
