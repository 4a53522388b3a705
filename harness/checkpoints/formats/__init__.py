"""The interface to all checkpoint formats: `find` returns the checkpoints under a path, `read` the layout of a
checkpoint.

No code from a checkpoint is run, and no torch is needed. A new format is one file in this folder, or in another
package, with a subclass of `Format` (format.py)."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from ..files import Files
from ..layout import Checkpoint, Problem, Trouble, Unreadable
from . import folders, table
from .format import Format
from .names import NUMBERED, UNFINISHED, number_in
from .needs import missing
from .numbered import Numbered
from .table import tracker_names, unread_type

UNKNOWN = "unknown"  # in place of the name of a format
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
        return table.of_folder(files, path, files.names(path))
    return table.of_name(posixpath.basename(path))


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
        form = kind(files, path) or (Numbered() if is_folder else table.of_start(files, path))
        found.by_content |= set() if is_folder else {path}
        found.files = folders.all_files(files, path)
        if form is None:
            raise table.of_no_format(files, path, files.size(path))
        found.format = form.name
        if is_folder:
            form.read_folder(files, path, found)
        else:
            form.read_file(files, path, files.size(path), found)
    except (Unreadable, OSError) as error:
        found.problems.append(folders.problem_of(error, name, path))
        if isinstance(error, Unreadable) and error.kind is Trouble.UNKNOWN:
            form = None
    found.problems = [_of_needed_file(form, found, problem) for problem in found.problems]
    others = (file for file in found.files if file.size and (form is None or file.path not in found.by_content))
    found.unread = sorted({end for file in others if (end := unread_type(file.path))})
    if not (found.tensors or found.values or found.problems):
        found.problems += _nothing(name, found)
    if form and UNFINISHED.search(name) and (not is_folder or kind(files, path)):
        text = f"{name}: its name says that it is not a finished checkpoint"
        found.problems.insert(0, Problem(Trouble.UNFINISHED, text, path))
    form = next((special for special in table.table() if special.refines(found)), form)
    found.format, found.step = form.name if form else UNKNOWN, step_of(name, found)
    found.missing = missing(form, found) if form and found.loadable else []
    return found


def unread(files: Files, root: str, seen: Collection[str] = ()) -> list[str]:
    """The types of files under a folder that may hold tensors, but belong to no readable checkpoint. `seen`: see
    `find`."""
    found: set[str | None] = set()
    for name in files.names(root) if files.is_dir(root) else ():
        path = f"{root}/{name}"
        if path in seen or kind(files, path) or files.is_alias(path, root):
            continue
        found |= set(unread(files, path, seen)) if files.is_dir(path) else {unread_type(name)} - {None}
    return sorted(end for end in found if end)


def in_order(found: list[Checkpoint]) -> list[Checkpoint]:
    """The checkpoints sorted by step. Checkpoints of unknown step come first."""
    return sorted(found, key=lambda checkpoint: (-1 if checkpoint.step is None else checkpoint.step, checkpoint.path))


def trackers(files: Files, root: str) -> list[Tracker]:
    """The tracker files that are directly in a folder. A file with such a name that does not hold the name of a file or
    folder beside it belongs to another program, and is left out."""
    if not files.is_dir(root):
        return []
    made = []
    for name in tracker_names():
        path = f"{root}/{name}"
        if not files.exists(path) or files.is_dir(path):
            continue
        text = files.read(path, 0, 4096).decode(errors="replace").strip()
        if text.isprintable() and re.search(r"[/\s]", text):
            continue
        named = [form.tracked(text) for form in table.table() if form.tracker == name]
        if text and not any(named):
            continue
        others = (other for other in files.names(root) if other != name and _is_named(text, other))
        there = (f"{root}/{target}" for target in (*named, text, *others) if target and "\0" not in target)
        made.append(Tracker(path, text, next(filter(files.exists, there), None)))
    return made


def _is_named(text: str, name: str) -> bool:
    """Whether a tracker with this text may mean the file or folder with this name: without its extension, or by its
    step alone."""
    numbers = map(int, re.findall(r"\d+", name))
    return bool(text) and (name.startswith(f"{text}.") or (text.isdecimal() and int(text) in numbers))


def step_of(name: str, found: Checkpoint) -> int | None:
    """The step of a checkpoint. If its framework stores a step count, it is read from the contents, otherwise from the
    name. The number in Accelerate's `checkpoint_3` is no step."""
    # The counter of Accelerate's random states is no step of training.
    values = {name: value for name, value in found.values.items() if "random_states" not in name}
    counted = {re.split(r"[:/]", name)[-1]: value for name, value in sorted(values.items())}
    named, by_name = NUMBERED.search(name), number_in(name)
    inside = [int(counted[key]) for key in _STEP_KEYS if counted.get(key, "").isdecimal()]
    if named and named["word"] not in ("checkpoint", "ckpt"):
        return by_name
    return inside[0] if inside else by_name


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
    """The problem; as damage, if a file that this format needs is of another kind than the format's."""
    inner = (problem.file or "")[len(found.path) + 1 :]
    if problem.kind is not Trouble.UNKNOWN or not form or not inner:
        return problem
    needed = any(re.search(pattern, inner) for pattern in form.needed_files.values())
    return replace(problem, kind=Trouble.UNREADABLE) if needed else problem


def _nothing(name: str, found: Checkpoint) -> list[Problem]:
    """The problem of a checkpoint in which no readable data was found. None for a file that was read to its end: a file
    of torch.save may hold an empty dict."""
    if found.unread:
        text = f"{name}: it holds files of the type {', '.join(found.unread)}, which are not read"
        return [Problem(Trouble.UNKNOWN, text, found.path)]
    if not any(file.size for file in found.files):
        return [Problem(Trouble.TORN, f"{name}: empty", found.path)]
    is_file = [file.path for file in found.files] == [found.path]
    return [] if is_file else [Problem(Trouble.UNKNOWN, f"{name}: it holds nothing that is read", found.path)]
