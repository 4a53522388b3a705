"""The interface to all checkpoint formats: `find` returns the checkpoints under a path, `read` the layout of a
checkpoint.

No code from a checkpoint is run, and no torch is needed. A new format is one file in this folder, or in another
package, with a subclass of `Format` (format.py)."""

from __future__ import annotations

import errno
import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..files import Files
from ..layout import Checkpoint, Problem, Trouble, Unreadable
from . import format, format_table
from .format import MARK, NUMBERED, UNFINISHED, Format, missing, number_in
from .format_table import tracker_names, unread_type
from .trainers import Numbered

UNKNOWN = "unknown"  # in place of the name of a format
_TRACKER = re.compile(
    r"^\.?(latest|last|newest|current)([._-]?(checkpoint|ckpt|step|iteration|model))?(\.(txt|json))?$", re.I
)
_LINK = re.compile(r"\.?(latest|last|newest|current|best)(?![a-z])", re.I)
_DIGITS = re.compile(r"\d+")
_STEP_KEYS = ("global_step", "iter_num", "iteration", "step")


@dataclass(frozen=True)
class Tracker:
    """A small file that names the newest checkpoint."""

    path: str
    text: str
    target: str | None  # the checkpoint that it names, if there is one


def kind(files: Files, path: str) -> Format | None:
    """The format of a checkpoint, from the name of a file or the names in a folder. None if it is neither a checkpoint
    nor a part of a checkpoint."""
    if files.is_dir(path):
        names = files.names(path)
        form = format_table.of_folder(files, path, names)
        return None if form and _holds_several(files, path, names) else form
    return format_table.of_name(posixpath.basename(path))


def _holds_several(files: Files, folder: str, names: Sequence[str]) -> bool:
    """Whether a folder that looks like a checkpoint contains several: it has a folder for each of several steps, and no
    file with tensors of its own."""
    steps = [name for name in names if NUMBERED.search(name) and files.is_dir(f"{folder}/{name}")]
    alike = Counter(_DIGITS.sub("#", name) for name in steps)
    if max(alike.values(), default=0) < 2:
        return False
    return not any(format_table.of_name(name) for name in names if not files.is_dir(f"{folder}/{name}"))


def find(files: Files, root: str, seen: Collection[str] = ()) -> list[str]:
    """The paths of all checkpoints under `root`, ordered by name. If `root` is a checkpoint itself, its path. A link to
    a checkpoint is not counted again. `seen`: paths that are checkpoints whatever their names are. Raises OSError if
    `root` can't be listed."""
    root = root.rstrip("/") or "/"
    if not files.is_dir(root):
        files.size(root)  # raises an error if the path does not exist
        return [root]
    return [root] if kind(files, root) else list(_below(files, root, root, seen))


def read(files: Files, path: str) -> Checkpoint:
    """The layout of one checkpoint. Raises nothing; errors become entries of its `problems`."""
    path = path.rstrip("/")
    name, found = posixpath.basename(path), Checkpoint(path, UNKNOWN)
    form: Format | None = None
    is_folder = False
    try:
        is_folder = files.is_dir(path)
        form = kind(files, path) or (Numbered() if is_folder else format_table.of_start(files, path))
        found.by_content |= set() if is_folder else {path}
        found.files = format.all_files(files, path)
        if form is None:
            raise format_table.of_no_format(files, path, files.size(path))
        found.format = form.name
        if is_folder:
            form.read_folder(files, path, found)
        else:
            form.read_file(files, path, files.size(path), found)
    except (Unreadable, OSError) as error:
        found.problems.append(format.problem_of(error, name, path))
        if isinstance(error, Unreadable) and error.kind is Trouble.UNKNOWN:
            form = None
    found.problems = [_of_needed_file(form, found, problem) for problem in found.problems]
    others = (file for file in found.files if file.size and (form is None or file.path not in found.by_content))
    found.unread = sorted({end for file in others if (end := unread_type(file.path))})
    if not (found.tensors or found.values or found.problems):
        found.problems += _nothing(name, found)
    if form and (not is_folder or kind(files, path)) and (why := why_unfinished(files, path)):
        found.problems.insert(0, Problem(Trouble.UNFINISHED, f"{name}: {why}", path))
    form = next((special for special in format_table.table() if special.refines(found)), form)
    found.format, found.step = form.name if form else UNKNOWN, step_of(name, found, is_folder)
    found.missing = missing(form, found) if form and found.loadable else []
    return found


def unread(files: Files, root: str, seen: Collection[str] = ()) -> dict[str, int]:
    """For each type of file that may hold tensors: how many such files under a folder belong to no readable checkpoint.
    `seen`: see `find`."""
    return types_of(unread_files(files, root, seen))


def types_of(paths: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(unread_type(posixpath.basename(path)) or "" for path in paths).items()))


def unread_files(files: Files, root: str, seen: Collection[str] = ()) -> Iterator[str]:
    """The paths of the files that `unread` counts."""
    for name in files.names(root) if files.is_dir(root) else ():
        path = f"{root}/{name}"
        if path in seen or kind(files, path) or files.is_alias(path, root):
            continue
        if files.is_dir(path):
            yield from unread_files(files, path, seen)
        elif unread_type(name):
            yield path


def in_order(found: list[Checkpoint]) -> list[Checkpoint]:
    """The checkpoints sorted by step. Those of unknown step come first, by the numbers in their paths: `model-5.pt`
    before `model-10.pt`."""

    def place(one: Checkpoint) -> tuple[int, list[tuple[str, int]]]:
        parts = [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", one.path)]
        return -1 if one.step is None else one.step, parts

    return sorted(found, key=place)


def trackers(files: Files, root: str) -> list[Tracker]:
    """The tracker files directly in a folder: those of formats, and other small files that are called `latest` or the
    like and hold a name or a path, as text or in JSON. A file of the second kind counts only if it names an entry of
    the folder, or if its text differs from the name of a checkpoint in the folder only in its number; otherwise it
    belongs to another program."""
    beside = files.names(root) if files.is_dir(root) else []
    made = []
    for name in beside:
        path = f"{root}/{name}"
        is_named = name in tracker_names() or bool(_TRACKER.match(name))
        is_link = _LINK.match(name) and files.is_alias(path, root)  # of a checkpoint: `latest-rank0.pt`
        if not (is_named or is_link) or files.is_dir(path):
            continue
        try:
            text = files.read(path, 0, 4096).decode(errors="replace").strip()
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and error.errno != errno.ELOOP:
                raise  # not if it is a broken link
            made.append(Tracker(path, posixpath.basename(os.path.realpath(path)), None))
            continue
        if not is_named:
            continue
        others = [other for other in beside if other != name]
        found = _of_format(files, root, name, text, others) or _of_any(files, root, text, others)
        made += [Tracker(path, *found)] if found else []
    return made


def _of_format(files: Files, root: str, name: str, text: str, others: Sequence[str]) -> tuple[str, str | None] | None:
    """The name in the tracker of a format, and the path that it names, if there is one. None if the file is no such
    tracker."""
    named = [form.tracked(text) for form in format_table.table() if form.tracker == name]
    if not named or (text and not any(named)) or (text.isprintable() and re.search(r"[/\s]", text)):
        return None
    alike = (other for other in others if _is_named(text, other))
    there = (f"{root}/{target}" for target in (*named, text, *alike) if target and "\0" not in target)
    return text, next(filter(files.exists, there), None)


def _of_any(files: Files, root: str, text: str, others: Sequence[str]) -> tuple[str, str | None] | None:
    """The name in a file, and the path that it names, if there is one. None if the file seems to name no checkpoint of
    this folder."""
    if not text.isprintable():
        return None
    try:
        value = json.loads(text) if text[:1] in ("{", "[", '"') else text
    except (ValueError, RecursionError):
        return None
    named = [posixpath.basename(one.rstrip("/")) for one in _texts(value) if 0 < len(one) < 1000]
    there = next((one for one in named if one in others), None)
    if there:
        return there, f"{root}/{there}"
    numbered = [other for other in others if _DIGITS.search(other) and kind(files, f"{root}/{other}")]
    lost = next((one for one in named if _DIGITS.sub("#", one) in {_DIGITS.sub("#", each) for each in numbered}), None)
    return (lost, None) if lost else None


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _is_named(text: str, name: str) -> bool:
    """Whether the text of a tracker file (such as `latest`) may mean this file or folder: it is the name without the
    extension, or a number that is in the name."""
    numbers = map(int, re.findall(r"\d+", name))
    return bool(text) and (name.startswith(f"{text}.") or (text.isdecimal() and int(text) in numbers))


def step_of(name: str, found: Checkpoint, is_folder: bool = False) -> int | None:
    """The step of a checkpoint: from its contents, if its framework stores a step count, otherwise from its name. The
    number in Accelerate's `checkpoint_3` is no step, and a file whose name is a number alone is the part of a rank."""
    named, by_name = NUMBERED.search(name), number_in(name) if is_folder or not name.isdecimal() else None
    if named and named["word"] not in ("checkpoint", "ckpt"):
        return by_name
    inside = counted_step(found)
    return by_name if inside is None else inside


def counted_step(found: Checkpoint) -> int | None:
    """The step count in the contents of a checkpoint, if it has one."""
    # The counter of Accelerate's random states is no step of training.
    values = {name: value for name, value in found.values.items() if "random_states" not in name}
    counted = {re.split(r"[:/]", name)[-1]: value for name, value in sorted(values.items())}
    return next((int(counted[key]) for key in _STEP_KEYS if counted.get(key, "").isdecimal()), None)


def why_unfinished(files: Files, path: str) -> str:
    """Why a checkpoint is not finished, by its name or by a mark beside it. Empty if nothing says so."""
    if UNFINISHED.search(posixpath.basename(path)):
        return "its name says that it is not a finished checkpoint"
    mark = f"{path}{MARK}"
    return f"{posixpath.basename(mark)} beside it says that it is not finished" if files.exists(mark) else ""


def _below(files: Files, folder: str, root: str, seen: Collection[str]) -> Iterator[str]:
    for name in files.names(folder):
        path = f"{folder}/{name}"
        if files.is_alias(path, root):
            continue
        if path in seen or kind(files, path):
            yield path
        elif files.is_dir(path):
            yield from _below(files, path, root, seen)


def _of_needed_file(form: Format | None, found: Checkpoint, problem: Problem) -> Problem:
    """The problem. It counts as damage if this format needs the file, and the file is of another kind than the
    format's."""
    inner = (problem.file or "")[len(found.path) + 1 :]
    if problem.kind is not Trouble.UNKNOWN or not form or not inner:
        return problem
    needed = any(re.search(pattern, inner) for pattern in form.needed_files.values())
    return replace(problem, kind=Trouble.UNREADABLE) if needed else problem


def _nothing(name: str, found: Checkpoint) -> list[Problem]:
    """The problem of a checkpoint in which no readable data was found. Empty for a file that was read to its end: a
    file of torch.save may hold an empty dict."""
    if found.unread:
        text = f"{name}: it holds files of the type {', '.join(found.unread)}, which are not read"
        return [Problem(Trouble.UNKNOWN, text, found.path)]
    if not any(file.size for file in found.files):
        return [Problem(Trouble.TORN, f"{name}: empty", found.path)]
    is_file = [file.path for file in found.files] == [found.path]
    seen = ", ".join(posixpath.basename(file.path) for file in found.files[:3])
    text = f"{name}: it holds nothing that is read: {seen}{', …' if len(found.files) > 3 else ''}"
    return [] if is_file else [Problem(Trouble.UNKNOWN, text, found.path)]
