"""Placeholders such as `{run}` in the texts of a scenario. Doubled braces stand for braces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

PLACEHOLDERS = ("run", "jobs", "here", "python", "nvml")
ENDPOINT = "endpoint."  # {endpoint.NAME}: the address of an endpoint of the job, or of the proxy in front of it
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def unknown_placeholders(text: str, endpoints: Iterable[str] = ()) -> list[str]:
    """The names of placeholders that do not exist; single braces count as unknown placeholders too. `endpoints`: the
    names of the job's endpoints."""
    known = {*PLACEHOLDERS, *(ENDPOINT + name for name in endpoints)}
    found = [match for match in _BRACES.finditer(text) if match[0] not in ("{{", "}}")]
    return [match[1] or "" for match in found if match[1] not in known]


def fill_some(text: str, values: Mapping[str, str]) -> str:
    """Replaces these placeholders by their values. The rest of the text stays, including doubled braces."""
    return _BRACES.sub(lambda match: values.get(match[1] or "", match[0]), text)


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replaces placeholders by their values. Placeholders without a value stay. Doubled braces become single braces."""

    def replaced(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        return values.get(match[1] or "", match[0])

    return _BRACES.sub(replaced, text)
