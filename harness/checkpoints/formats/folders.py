"""Reads from the names of files and folders: the step, and whether the checkpoint is finished."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ..files import Files
from ..layout import Checkpoint, File, Problem, Trouble, Unreadable
from ..tensor_values import Contents
from .table import of_folder, of_name, of_start, role_of, table

UNFINISHED = re.compile(r"^\.|^tmp[-_]|[._-](partial|tmp|temp|incomplete|writing|damaged|corrupt)\b")
MARK = "-unfinished"  # the end of the name of a file that NeMo 2 keeps beside a checkpoint until it is finished
UNKNOWN_LAYOUT = "dir"  # the name of Numbered: a folder that belongs to no other format
NUMBERED = re.compile(  # `ba`: batches, as Composer counts its steps
    r"(?P<word>checkpoint|ckpt|step|iter|iteration|(?<![a-zA-Z])ba)[-_=]?(?P<number>\d+)"
)


def number_in(name: str) -> int | None:
    """The step in the name of a checkpoint. Nanotron and Orbax name a folder by the number alone."""
    found = NUMBERED.search(name)
    number = found["number"] if found else name
    return int(number) if number.isdecimal() else None


# Folders of files that together are one checkpoint, of any format. Each file is read by its own format.

_JSON = 1 << 26
_OF = re.compile(r"^(?P<head>.+-)(?P<number>\d{5})-of-(?P<count>\d{5})(?P<tail>\.\w+)$")
_COMMENT, _TRAILING = re.compile(rb"^\s*//[^\n]*$|/\*.*?\*/", re.M | re.S), re.compile(rb",(\s*[}\]])")
_MOST_RANKS = 100_000


def read_folder(files: Files, folder: str, into: Checkpoint, prefix: str = "") -> None:
    """Reads everything in the folder, including folders in it. A problem in one file is recorded, and the other files
    are still read."""
    names = files.names(folder)
    read = {name for each_format in table() for name in each_format.read_parts(files, folder, names, into, prefix)}
    for name in names:
        if name in read:
            continue
        path = f"{folder}/{name}"
        try:
            if not files.is_dir(path):
                _read_file(files, path, into, prefix, name)
            elif form := of_folder(files, path, files.names(path)):
                if form.name != UNKNOWN_LAYOUT:
                    into.inner.append(f"{prefix}{name}/")
                form.read_folder(files, path, into, f"{prefix}{name}/")
            else:
                read_folder(files, path, into, f"{prefix}{name}/")
        except (Unreadable, OSError) as error:
            into.problems.append(problem_of(error, prefix + name, path))
    _check_numbers(names, into, prefix)
    for known in table():
        known.check_set(files, folder, names, into, prefix)


def problem_of(error: Exception, what: str, path: str) -> Problem:
    """The problem that an Unreadable or an OSError describes. `what`: the tensor or file that could not be read."""
    if isinstance(error, Unreadable):
        return Problem(error.kind, f"{what}: {error}", path)
    gone = isinstance(error, FileNotFoundError)
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Problem(Trouble.TORN if gone else Trouble.UNREADABLE, f"{what}: {text}", path)


def _read_file(files: Files, path: str, into: Checkpoint, prefix: str, name: str) -> None:
    if form := of_name(name):
        form.read_file(files, path, files.size(path), into, f"{prefix}{name}:")
    elif name.endswith(".json"):
        values = read_json(files, path)
        plain = {key: value for key, value in values.items() if not isinstance(value, (dict, list))}
        Contents(into.values, into.tensors, into.opaque).add(f"{prefix}{name}:", plain, lambda _name, _ref: None)
    elif form := of_start(files, path, in_folder=True):
        into.by_content.add(path)
        form.read_file(files, path, files.size(path), into, f"{prefix}{name}:")


def read_json(files: Files, path: str) -> dict[str, Any]:
    """The contents of a JSON file. Empty if it is JSON, but no object. Raises Unreadable."""
    size = files.size(path)
    if size > _JSON:
        raise Unreadable(f"{size} bytes of JSON, more than are read", Trouble.LIMIT)
    text = files.read(path, 0, size)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if _is_lines(text) or _is_commented(text):
            return {}
        kind = Trouble.TORN if not size or _is_cut_off(text, error) else Trouble.UNREADABLE
        raise Unreadable(f"no JSON: {str(error)[:100]}", kind) from error
    return found if isinstance(found, dict) else {}


def _is_cut_off(text: bytes, error: Exception) -> bool:
    """Whether the JSON is right up to the end of the file, where more should follow."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    rest = text.decode(errors="replace")[error.pos :].strip()
    return error.msg.startswith("Unterminated string") or re.fullmatch(r"[\w.+-]*", rest) is not None


def _is_lines(text: bytes) -> bool:
    """Whether each line of a file is JSON, as in many logs."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return len(lines) > 1 and all(isinstance(json.loads(line), (dict, list)) for line in lines)
    except (ValueError, RecursionError):
        return False


def _is_commented(text: bytes) -> bool:
    """Whether it is JSON but for comments and for commas before a bracket, which many readers accept."""
    plain = _TRAILING.sub(rb"\1", _COMMENT.sub(b"", text))
    try:
        return plain != text and isinstance(json.loads(plain), (dict, list))
    except (ValueError, RecursionError):
        return False


def _check_numbers(names: Sequence[str], into: Checkpoint, prefix: str) -> None:
    """Checks that all files of a numbered set exist, for example three files `model-00001-of-00003.safetensors`."""
    have = set(names)
    for name in names:
        if whole := _OF.match(name):
            each = f"{whole['head']}{{:05}}-of-{whole['count']}{whole['tail']}"
            first, count = int(each.format(0) not in have), min(int(whole["count"]), 9999)
            note_missing(into, prefix, [each.format(number) for number in range(first, first + count)], have)


def check_ranks(pattern: re.Pattern[str], names: Sequence[str], into: Checkpoint, prefix: str) -> None:
    """Adds a problem for each missing file of a rank that is not the last rank. The pattern has the groups `head`,
    `rank` and `tail`."""
    found = [match for match in map(pattern.match, names) if match]
    ranks = {int(match["rank"]) for match in found}
    if found and len(ranks) < max(ranks) + 1 <= _MOST_RANKS:
        for rank in sorted(set(range(max(ranks) + 1)) - ranks):
            text = f"{prefix}{found[0]['head']}{rank}{found[0]['tail']}: missing, and those of later ranks are there"
            into.problems.append(Problem(Trouble.TORN, text))


def note_missing(into: Checkpoint, prefix: str, wanted: Sequence[str], have: set[str]) -> None:
    """Adds a problem for each file in `wanted` that the folder lacks."""
    for name in wanted:
        text = f"{prefix}{name}: missing"
        if name not in have and all(problem.text != text for problem in into.problems):
            into.problems.append(Problem(Trouble.TORN, text))


def all_files(files: Files, path: str) -> list[File]:
    """Every file of a checkpoint, with its size in bytes. A broken link has size 0."""
    if not files.is_dir(path):
        return [File(path, files.size(path), role_of(path))]
    found: list[File] = []
    for name in files.names(path):
        inner = f"{path}/{name}"
        try:
            found += all_files(files, inner)
        except OSError:
            found.append(File(inner, 0, role_of(inner)))
    return found
