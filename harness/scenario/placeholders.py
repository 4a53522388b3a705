"""`{run}` and its kin in the texts of a scenario; doubled braces are braces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

PLACEHOLDERS = ("run", "jobs", "here", "python", "nvml")
ENDPOINT = "endpoint."  # {endpoint.NAME}: the address of one of job.endpoints, that a proxy may stand before
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def unknown_placeholders(text: str, endpoints: Iterable[str] = ()) -> list[str]:
    known = {*PLACEHOLDERS, *(ENDPOINT + name for name in endpoints)}
    found = [match for match in _BRACES.finditer(text) if match[0] not in ("{{", "}}")]
    return [match[1] or "" for match in found if match[1] not in known]


def fill_some(text: str, values: Mapping[str, str]) -> str:
    """Put values in for these placeholders, and leave all else as it is, doubled braces too."""
    return _BRACES.sub(lambda match: values.get(match[1] or "", match[0]), text)


def fill(text: str, values: Mapping[str, str]) -> str:
    """Put values in for placeholders; those that have none here stay, doubled braces become single ones."""

    def one(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        return values.get(match[1] or "", match[0])

    return _BRACES.sub(one, text)
