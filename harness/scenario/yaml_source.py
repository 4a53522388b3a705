"""Reads YAML into plain data, with the place of each key and value, without the surprises of YAML 1.1. Only `true` and
`false` are booleans. Only decimal digits make an integer: `017`, `10:30` and dates are text. `1e-3` is a number. Values
of `job.env` are text, exactly as they are written. It is an error if a key occurs twice, or if the file is too large,
too deep, or not UTF-8."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import counted

MAX_BYTES, MAX_NODES, MAX_DEPTH = 1 << 20, 20_000, 40
Keys = tuple[str | int, ...]


@dataclass(frozen=True, order=True)
class Place:
    """A place in a file; lines and columns are counted from 1, as in editors."""

    line: int  # 0: the text is from the command line
    column: int
    file: str = ""  # empty: the scenario's own file

    def within(self, path: Path) -> str:
        """The place as `file:line:column`. `path`: the scenario's own file."""
        file = self.file or str(path)
        return f"{file}:{self.line}:{self.column}" if self.line else file


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake in a file."""

    place: Place
    text: str  # what is wrong, and what to do


class ScenarioError(UsageError):
    """All mistakes in one file, in order of their places, with a line for each."""

    def __init__(self, path: Path, problems: Sequence[Problem], elsewhere: Sequence[str] = ()) -> None:
        """`elsewhere`: lines about other files that this file names."""
        self.problems = sorted(set(problems))
        lines = [f"{p.place.within(path)}: {p.text}" for p in self.problems]
        super().__init__("\n".join(dict.fromkeys([*lines, *elsewhere])))


@dataclass
class Source:
    """A YAML document: its data, and the places of its values and keys."""

    path: Path
    data: dict[str, Any]
    values: dict[Keys, Place] = field(default_factory=dict)
    keys: dict[Keys, Place] = field(default_factory=dict)
    texts: dict[Keys, str] = field(default_factory=dict)  # of numbers and booleans: how they are written

    def place(self, keys: Keys, key: bool = False) -> Place:
        """The place of a value; with `key`, the place of its key. If the file does not contain it, the place of the
        enclosing value."""
        for end in range(len(keys), -1, -1):
            at = keys[:end]
            found = (self.keys if key else self.values).get(at) or self.values.get(at)
            if found:
                return found
        return Place(1, 1)

    def take_as_text(self, places: Iterable[Keys]) -> bool:
        """Puts the text of numbers and booleans into the data, exactly as it is written. Returns False if no value at
        these places is one."""
        known = {keys for keys in places if keys in self.texts}
        numbers = known - {keys[:end] for keys in known for end in range(len(keys))}  # the list itself may be right
        for keys in numbers:
            holder: Any = self.data
            for part in keys[:-1]:
                holder = holder[part]
            holder[keys[-1]] = self.texts.pop(keys)
        return bool(numbers)


_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_ENV = ("job", "env")
_TAGS = ("map", "seq", "str", "bool", "null", "int", "float")


class _Loader(yaml.SafeLoader):
    """Reads YAML by the core schema of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    nodes = depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuses a large or deep document while it is read, because it would cost seconds or overflow the stack."""
        self.nodes, self.depth = self.nodes + 1, self.depth + 1
        if self.nodes > 2 * MAX_NODES or self.depth > MAX_DEPTH + 1:  # keys are nodes too
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=_too_much(self.depth > MAX_DEPTH + 1), problem_mark=mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or `_Loader` would read as another type, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)", "-+.0123456789"),
):
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def read(path: Path) -> Source:
    """Reads a file. Raises UsageError if it can't be read, and ScenarioError if it is not a single mapping of plain
    data."""
    return parse(path, _text(path))


def raw(path: Path) -> bytes:
    """The bytes of a file. Raises UsageError if it can't be read or is larger than a scenario may be."""
    try:
        with open(path, "rb") as file:
            found = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: it can't be read: {error.strerror}; give the path of a YAML file") from error
    if len(found) > MAX_BYTES:
        raise ScenarioError(path, [Problem(Place(1, 1), "the file is larger than 1 MiB; a scenario is small")])
    return found


def _text(path: Path) -> str:
    found = raw(path)
    try:
        if found.count(0) > 1:  # UTF-16, or no text at all
            at = found.index(0)
            raise UnicodeDecodeError("utf-8", found, at, at + 1, "NUL")
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = found[: error.start]
        place = Place(before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        raise ScenarioError(path, [Problem(place, "this is not UTF-8 text; save the file as UTF-8")]) from error


def parse(path: Path, text: str) -> Source:
    """Parses the text of a file as `read` does. `path`: for messages."""
    source = Source(path, {})
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None or root.tag.endswith(":null"):
                raise _wrong(None, "the file is empty; a scenario has at least the keys scenario, job and assert")
            if not isinstance(root, yaml.MappingNode):
                raise _wrong(
                    root, "this is no mapping, with keys such as scenario, job, faults and assert; give another file"
                )
            source.data = _Builder(loader, source).build(root, ())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ScenarioError(path, [Problem(_place(mark), _words(error) + _if_no_yaml(path))]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        bad = f"the character U+{_code(error.character):04X} is not allowed in YAML; remove it"
        raise ScenarioError(path, [Problem(Place(line, column), bad)]) from None
    except (ValueError, OverflowError):  # "\\UFFFFFFFF" makes PyYAML's own chr() fail
        mark = loader.get_mark()
        raise ScenarioError(path, [Problem(_place(mark), "this escape is not a valid character; correct it")]) from None
    return source


class _Builder:
    def __init__(self, loader: _Loader, source: Source) -> None:
        self._loader, self._source, self._nodes = loader, source, 0

    def build(self, node: yaml.Node, at: Keys) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or len(at) > MAX_DEPTH:
            raise _wrong(node, _too_much(self._nodes <= MAX_NODES))
        self._source.values[at] = _place(node.start_mark)
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag[18:] not in _TAGS:
            raise _wrong(node, f"the tag {node.tag} is not allowed; a scenario is plain data")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*at, number)) for number, item in enumerate(node.value)]
        return self._scalar(node, at)

    def _mapping(self, node: yaml.MappingNode, at: Keys) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _wrong(key, "a key is a single word")
            name = str(key.value)
            inside: Keys = (*at, name)
            if name == "<<":
                raise _wrong(key, "merge keys are not supported; use an alias for a whole value, or write it out")
            if name in found:
                line = self._source.keys[inside].line
                raise _wrong(key, f"the key {name!r} occurs here a second time (first in line {line}); remove one")
            self._source.keys[inside] = _place(key.start_mark)
            found[name] = self.build(value, inside)
        return found

    def _scalar(self, node: yaml.Node, at: Keys) -> Any:
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        if tag not in ("str", "null"):
            self._source.texts[at] = str(node.value)
        if tag == "str" or (at[:-1] == _ENV and tag != "null"):
            if bad := _NO_TEXT.search(node.value):
                raise _wrong(
                    node, f"the text has U+{ord(bad[0]):04X}, which a command or path can't contain; remove it"
                )
            return str(node.value)
        if tag == "int" and len(node.value) > 18:
            raise _wrong(node, "this number is too large")
        try:
            found = int(node.value) if tag == "int" else self._loader.construct_object(node)
            if isinstance(found, float) and not math.isfinite(found):
                raise OverflowError
            return found
        except OverflowError:
            raise _wrong(node, "this number is too large") from None
        except (ValueError, KeyError, yaml.YAMLError):
            raise _wrong(
                node, f"{node.value!r} is not of type {tag}; correct it, or put it in quotes as text"
            ) from None


def dumped(data: Any) -> str:
    """The data as YAML that `parse` reads back unchanged. Keys keep their order."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120)
    return text


def value_of(text: str, at: Keys) -> Source:
    """Reads a single value, such as that after `--set`, by the same rules. The value is `data[""]` of the result. `at`:
    its place in the scenario. A text that is no YAML value, such as `{run}/logs`, stays text, and so does a value of
    `job.env` without quotes. Raises ValueError if it can't be text either."""
    source = Source(Path("--set"), {"": text})
    if _NO_TEXT.search(text):
        raise ValueError(f"{text!r} is not text")
    if at[:-1] != _ENV or text.startswith(('"', "'")):
        with suppress(yaml.YAMLError, ValueError, OverflowError):
            loader = _Loader(f"'': {text}\n")
            root = loader.get_single_node()
            if root is not None and len(root.value) == 1:  # several: the text goes on after its value
                source.data[""] = _Builder(loader, source).build(root.value[0][1], at)
    source.texts[at] = text
    return source


def _too_much(deep: bool) -> str:
    limit = f"{MAX_DEPTH} levels" if deep else f"{MAX_NODES} values"
    return f"more than {limit}, aliases counted; a scenario is small"


def _wrong(node: yaml.Node | None, text: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark if node else None)


def _code(character: int | str) -> int:
    return character if isinstance(character, int) else ord(character)


def _place(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)


# What PyYAML says (its scanner.py, parser.py and composer.py), and what to do about it.
_ADVICE = (
    (r"'\\t'", "a tab can't be used here; use spaces"),
    (r"expected a single document", "a second document starts here; one file holds one scenario"),
    (r"mapping values are not allowed", "a colon is out of place here; quote the text, or check the indentation"),
    (r"could not find expected ':'", "a `key: value` is expected here; add the colon, or check the indentation"),
    (r"character (.+) that cannot start any token", "a value can't begin with {0}; quote it"),
    (
        r"flow (?:sequence|mapping|node).*expected the node content|expected the node content.*flow (?:sequence|node)",
        "a '[' or a '{{' before this is not closed; close it, or write one item in each line",
    ),
    (r"expected ',' or '([\]}])'", "a ',' or a '{0}' is missing before this"),
    (r"found unexpected end of stream", "the file ends inside quotes or brackets, which are never closed"),
    (r"found undefined alias '(.+)'", "*{0} is an alias that no &{0} defines; quote the text if it is none"),
    (r"chomping or indentation indicators", "after | or > the text begins on the next line; or quote the value"),
    (r"expected alphabetic or numeric character", "* and & begin an alias or an anchor in YAML; quote the text"),
)


def _if_no_yaml(path: Path) -> str:
    other = path.suffix not in ("", ".yaml", ".yml", ".json")
    return f"; the file is read as YAML: is {path.name} the right one?" if other else ""


def _words(error: yaml.MarkedYAMLError) -> str:
    """What is wrong, and what to do, in words that do not need the grammar of YAML."""
    problem = " ".join(str(error.problem or error.context or "this is not YAML").split())
    begun, here = error.context_mark, error.problem_mark
    if "expected <block end>" in problem and begun and here:
        if here.buffer and here.buffer[here.pointer - here.column : here.pointer].strip():
            return "the value is over before this; quote the whole value, or remove what is too much"
        if here.column != begun.column:
            return (
                f"this line is indented by {counted(here.column, 'space')}, which fits no line above it; correct that"
            )
        kind = "an item of a list, which begins with '- '" if "collection" in str(error.context) else "a `key: value`"
        return f"{kind} is expected here, as in line {begun.line + 1}"
    for pattern, advice in _ADVICE:
        if found := re.search(pattern, f"{problem} {error.context}"):
            return advice.format(*found.groups())
    return problem
