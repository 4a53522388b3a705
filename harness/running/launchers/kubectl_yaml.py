"""Reads YAML as kubectl does, whose reader (go-yaml 2, resolve.go) has other types than PyYAML: `1e3`, `08` and `0o17`
are numbers, `y` and `n` are booleans, `10:30` is text, and every key is text."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Hashable
from typing import Any

import yaml

_WORDS = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}
# Go's strconv.ParseInt with base 0, after go-yaml has removed all underscores.
_INTEGER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)")
_PLAIN, _MERGE = "!plain", "tag:yaml.org,2002:merge"
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


class _Loader(yaml.SafeLoader):
    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:  # it has neither quotes nor a tag
            return _MERGE if value == "<<" else _PLAIN
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        return {_key(key): value for key, value in super().construct_mapping(node, deep=deep).items()}


def _plain(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    digits = text.replace("_", "") if text[0] in "-+0123456789" else text
    if _INTEGER.fullmatch(digits):
        sign, rest = (-1 if digits[0] == "-" else 1), digits.lstrip("-+").lower()
        base = {"0x": 16, "0b": 2, "0o": 8}.get(rest[:2], 8 if rest[0] == "0" else 10)
        value = sign * int(rest.removeprefix("0o"), base)
        return value if -(1 << 63) <= value < 1 << 64 else float(value)
    if _FLOAT.fullmatch(digits):
        value_ = float(digits)
        return int(value_) if value_.is_integer() and abs(value_) < 1e21 else value_  # as Go writes it to JSON
    return text


def _key(key: object) -> str:
    return key if isinstance(key, str) else json.dumps(key)


_Loader.add_constructor(_PLAIN, lambda loader, node: _plain(node.value))
_Loader.add_constructor(_MERGE, lambda loader, node: node.value)
_Loader.add_constructor("tag:yaml.org,2002:binary", lambda loader, node: base64.b64decode(node.value).decode())


def documents(text: str) -> list[Any]:
    """The documents of a file in YAML or JSON. Raises yaml.YAMLError if it is neither."""
    try:
        return [json.loads(text)]  # JSON may have tabs, which PyYAML does not take
    except ValueError:
        return [found for found in yaml.load_all(text, _Loader) if found is not None]
