"""Makes Markdown tables, and puts JSON Schema into words."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DURATION, SIZE = "ms|s|m|h|d", "[KMGT]"  # parts of their patterns by which they are recognized
NOTHING = object()


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def code(value: object) -> str:
    return f"`{value}`"


def doc(found: Any) -> str:
    """The docstring with each of its paragraphs on one line."""
    return inspect.cleandoc(found.__doc__ or "")


def default(value: object) -> str:
    """A default value as it is written in YAML."""
    if value is NOTHING:
        return "required"
    if isinstance(value, bool):
        return code(str(value).lower())
    return "" if value is None or value in ("", [], {}) else code(value)


def words(schema: Mapping[str, Any]) -> str:
    """The allowed values in words, from a JSON Schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(words(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "const" in schema or "enum" in schema:
        return ", ".join(code(default(allowed).strip("`")) for allowed in schema.get("enum", [schema.get("const")]))
    return _of_type(schema)


def _of_type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if kind == "array":
        return f"list of: {words(schema.get('items', {}))}"
    if kind in ("integer", "number"):
        return " ".join(["whole number" if kind == "integer" else "number", *_bounds(schema)])
    if kind == "object":
        more = schema.get("additionalProperties")
        return f"names, each with: {words(more)}" if isinstance(more, dict) and more else "names with values"
    if kind == "boolean":
        return "`true` or `false`"
    pattern = str(schema.get("pattern", ""))
    if DURATION in pattern:
        return "duration (`250ms`, `30s`, `1h30m`)"
    return "size in bytes (`64MB`, `5GB`)" if SIZE in pattern else "text" if kind == "string" else "anything"


def _bounds(schema: Mapping[str, Any]) -> Iterable[str]:
    names = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return [f"{word} {schema[name]:g}" for name, word in names.items() if name in schema]
