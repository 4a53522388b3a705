"""YAML with positions and without its traps: what a file says, and where it says it.

Plain values are read as in YAML 1.2's core schema, and a little stricter: only `true` and `false` are booleans,
`1e-3` is a number, `017`, `10:30`, `on` and dates are text. Keys are always text. Tags are refused, duplicate
keys too; merge keys and aliases may be used within limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import yaml
from yaml.reader import Reader

from torchaos.harness import yaml_errors
from torchaos.harness.problems import Path, Problem, ScenarioError

MAX_BYTES, MAX_DEPTH, MAX_NODES = 1_000_000, 40, 20_000
_MERGE = "tag:yaml.org,2002:merge"


class _Refused(Exception):
    """Reading can't go on after this."""

    def __init__(self, index: int, what: str) -> None:
        self.index, self.what = index, what


class _Loader(yaml.SafeLoader):
    """Composes nodes and nothing else; bounded, since both the composer and what is built of it recurse."""

    yaml_implicit_resolvers = {}
    depth = nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self.depth, self.nodes = self.depth + 1, self.nodes + 1
        if self.depth > MAX_DEPTH:
            raise _Refused(event.start_mark.index, f"nested more than {MAX_DEPTH} deep; a scenario needs far less")
        if self.nodes > MAX_NODES:
            raise _Refused(event.start_mark.index, f"more than {MAX_NODES} values; a scenario needs far fewer")
        if getattr(event, "tag", None) is not None:
            raise _Refused(
                event.start_mark.index, f"the tag {event.tag} is not allowed; write the plain value, text in quotes"
            )
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


for _tag, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("int", r"-?(?:0|[1-9][0-9]{0,18})", "-0123456789"),
    ("float", r"-?(?:(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,2})?", "-0123456789."),
    ("null", r"~|null|", ["~", "n", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


@dataclass(frozen=True)
class _Place:
    key: int  # index of the key in the text, or of the item
    start: int
    end: int


class Source:
    """The data of one YAML text. `problems` of its own are those that leave the rest readable."""

    def __init__(self, name: str, text: str) -> None:
        """Raises ScenarioError where the text is no single YAML document."""
        self.name, self.text, self.data = name, text, None
        self._places: dict[Path, _Place] = {}
        self._found: list[tuple[int, str]] = []
        self._open: set[int] = set()
        self._built = 0
        try:
            node = self._compose()
            if node is None:
                raise _Refused(0, "the file is empty; it needs at least 'scenario:' and 'job:'")
            self.data: Any = self._build(node, (), node.start_mark.index)
        except _Refused as error:
            raise ScenarioError([self._line(error.index, error.what)]) from None

    @classmethod
    def read(cls, file: File) -> Source:
        """Raises ScenarioError where the file can't be read."""
        name = str(file)
        try:
            with open(file, "rb") as opened:
                raw = opened.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            why = getattr(error, "strerror", None) or str(error)
            raise ScenarioError([f"{name}: can't be read: {why}; give the path of a scenario file"]) from error
        if len(raw) > MAX_BYTES:
            raise ScenarioError(
                [f"{name}:1:1: larger than {MAX_BYTES // 1_000_000} MB; a scenario is a small YAML file"]
            )
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            before = raw[: error.start].decode("utf-8")
            raise ScenarioError(
                [
                    f"{name}:{_position(before, len(before))}: byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8"
                ]
            ) from error
        return cls(name, text.removeprefix("\ufeff"))

    def located(self, problem: Problem) -> tuple[int, str]:
        """Where to sort a problem of this text, and the line that tells of it."""
        path = problem.path
        while path not in self._places and path:
            path = path[:-1]
        place = self._places.get(path, _Place(0, 0, 0))
        index = place.key if problem.at_key else place.start
        if problem.text:
            found = self.text.find(problem.text, place.start, place.end)
            index = place.start if found < 0 else found
        return index, self._line(index, problem.what)

    def own_problems(self) -> list[tuple[int, str]]:
        return list(self._found)

    def _line(self, index: int, what: str) -> str:
        return f"{self.name}:{_position(self.text, index)}: {what}"

    def _compose(self) -> Any:
        if bad := Reader.NON_PRINTABLE.search(self.text):
            raise _Refused(bad.start(), f"the character U+{ord(bad.group()):04X} is not allowed in YAML; remove it")
        loader = _Loader(self.text)
        try:
            return loader.get_single_node()  # type: ignore[no-untyped-call]
        except yaml.MarkedYAMLError as error:
            raise _Refused(*yaml_errors.explain(error)) from None
        except (ValueError, OverflowError):  # an escape such as "\UFFFFFFFF", which PyYAML hands to chr
            raise _Refused(loader.get_mark().index, "the escape stands for no character; mend it") from None  # type: ignore[no-untyped-call]
        finally:
            loader.dispose()  # type: ignore[no-untyped-call]

    @contextmanager
    def _entered(self, node: Any) -> Iterator[None]:
        self._built += 1
        if self._built > MAX_NODES:
            raise _Refused(
                node.start_mark.index, f"the aliases stand for more than {MAX_NODES} values; write out what is meant"
            )
        if id(node) in self._open:
            raise _Refused(node.start_mark.index, "an alias inside its own anchor has no end; write out what is meant")
        self._open.add(id(node))
        try:
            yield
        finally:
            self._open.discard(id(node))

    def _build(self, node: Any, path: Path, key: int) -> Any:
        with self._entered(node):
            self._places[path] = _Place(key, node.start_mark.index, node.end_mark.index)
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node)
            if isinstance(node, yaml.SequenceNode):
                return [self._build(item, (*path, n), item.start_mark.index) for n, item in enumerate(node.value)]
            return self._mapping(node, path)

    def _mapping(self, node: Any, path: Path) -> dict[str, Any]:
        keys: dict[str, int] = {}
        pairs = []
        merged: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._found.append(
                    (key.start_mark.index, "a key must be plain text; put a value that starts with { or [ in quotes")
                )
            elif key.value in keys:
                first = _position(self.text, keys[key.value]).split(":")
                what = (
                    f"{key.value!r} is there twice, first at line {first[0]}, column {first[1]}; remove one of the two"
                )
                self._found.append((key.start_mark.index, what))
            else:
                keys[key.value] = key.start_mark.index
                if key.tag == _MERGE:
                    merged = self._merged(value, path)
                else:
                    pairs.append((key, value))
        own = {
            self._scalar(key, plain=True): self._build(value, (*path, key.value), key.start_mark.index)
            for key, value in pairs
        }
        return {**merged, **own}

    def _merged(self, node: Any, path: Path) -> dict[str, Any]:
        """Of several mappings the first that has a key gives its value; the mapping's own keys come before all."""
        result: dict[str, Any] = {}
        for source in reversed(node.value if isinstance(node, yaml.SequenceNode) else [node]):
            if isinstance(source, yaml.MappingNode):
                with self._entered(source):
                    result.update(self._mapping(source, path))
            else:
                self._found.append((source.start_mark.index, "<< merges mappings alone; give it an alias of a mapping"))
        return result

    def _scalar(self, node: Any, plain: bool = False) -> Any:
        text = str(node.value)
        if bad := re.search("[\0\ud800-\udfff]", text):
            self._found.append(
                (node.start_mark.index, f"the text holds the character U+{ord(bad.group()):04X}; take it out")
            )
            return "?"
        kind = node.tag.rpartition(":")[2]
        if plain or kind not in _READ:
            return text
        return _READ[kind](text)


_READ = {"bool": lambda text: text == "true", "int": int, "float": float, "null": lambda _text: None}


def _position(text: str, index: int) -> str:
    """LINE:COLUMN, both from 1, in characters."""
    index = min(index, len(text))
    return f"{text.count(chr(10), 0, index) + 1}:{index - text.rfind(chr(10), 0, index)}"
