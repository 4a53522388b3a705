"""All checkpoint formats behind one interface: `find` the checkpoints under a path, `read` the layout of one.

Nothing in a checkpoint is run, and no torch is needed. A new format is a module with a reader here, and an entry in
`kind` and `read`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..files import Files
from ..layout import Checkpoint, Problem, Trouble, Unreadable
from . import dcp, folders, safetensors, torch_save
from .names import NUMBERED, TRACKERS, UNFINISHED, is_torch, unread_type
from .needs import missing

_STEP_KEYS = ("global_step", "iter_num", "iteration", "step")
_READERS = {"dcp": dcp.read_folder}


@dataclass(frozen=True)
class Tracker:
    """A small file that names the newest checkpoint: DeepSpeed's `latest`, Megatron's."""

    path: str
    text: str
    target: str | None  # the checkpoint that it names, if there is one


def kind(files: Files, path: str) -> str | None:
    """dcp, torch, safetensors, huggingface, ...; None: no checkpoint, and not a part of one."""
    name = posixpath.basename(path)
    if files.is_dir(path):
        names = files.names(path)
        form = folders.form_of(names, path)
        return None if form == "dir" and _only_holds_checkpoints(files, path, names) else form
    return "safetensors" if name.endswith(".safetensors") else "torch" if is_torch(name) else None


def find(files: Files, root: str) -> list[str]:
    """The paths of all checkpoints under `root`, or itself if it is one. A link to one of them is not another one.

    In the order of their names; `in_order` sorts what was read. Raises OSError where `root` can't be listed.
    """
    root = root.rstrip("/") or "/"
    if not files.is_dir(root):
        files.size(root)  # raises where it is not there
        return [root]
    return [root] if kind(files, root) else list(_below(files, root, root))


def read(files: Files, path: str) -> Checkpoint:
    """The layout of one checkpoint. What is wrong with it is in its `problems`; nothing is raised."""
    path = path.rstrip("/")
    name, found = posixpath.basename(path), Checkpoint(path, "dir")
    try:
        found.format = kind(files, path) or ("dir" if files.is_dir(path) else _by_content(files, path))
        found.files = folders.all_files(files, path)
        if files.is_dir(path):
            _READERS.get(found.format, folders.read_folder)(files, path, found)
        else:
            reader = safetensors.read_file if found.format == "safetensors" else torch_save.read_file
            reader(files, path, files.size(path), found)
    except (Unreadable, OSError) as error:
        found.problems.append(folders.problem_of(error, name, path))
    found.unread = sorted({end for file in found.files if file.size and (end := unread_type(file.path))})
    if not (found.tensors or found.values or found.problems):
        found.problems.append(_nothing(name, found))
    if UNFINISHED.search(name):
        text = f"{name}: its name says that it is not a finished checkpoint"
        found.problems.insert(0, Problem(Trouble.UNFINISHED, text, path))
    if found.format == "torch" and "pytorch-lightning_version" in found.values:
        found.format = "lightning"
    found.step = step_of(name, found)
    found.missing = missing(found) if found.loadable else []
    return found


def unread(files: Files, root: str) -> list[str]:
    """The types of files under a folder that may hold tensors, and are of no checkpoint that can be read."""
    found: set[str | None] = set()
    for name in files.names(root) if files.is_dir(root) else ():
        path = f"{root}/{name}"
        if kind(files, path) or files.is_alias(path, root):
            continue
        found |= set(unread(files, path)) if files.is_dir(path) else {unread_type(name)} - {None}
    return sorted(end for end in found if end)


def in_order(found: list[Checkpoint]) -> list[Checkpoint]:
    """The oldest step first; those of unknown step before all others."""
    return sorted(found, key=lambda one: (-1 if one.step is None else one.step, one.path))


def trackers(files: Files, root: str) -> list[Tracker]:
    """The tracker files right under a folder."""
    if not files.is_dir(root):
        return []
    made = []
    for name in TRACKERS:
        path = f"{root}/{name}"
        if not files.exists(path) or files.is_dir(path):
            continue
        text = files.read(path, 0, 4096).decode(errors="replace").strip()
        target = f"iter_{int(text):07}" if text.isdecimal() else text
        there = bool(target) and "/" not in target and files.exists(f"{root}/{target}")
        made.append(Tracker(path, text, f"{root}/{target}" if there else None))
    return made


def step_of(name: str, found: Checkpoint) -> int | None:
    """From the contents where a framework counts there, else from the name; Accelerate's `checkpoint_3` is no step."""
    values = {name: value for name, value in found.values.items() if "random_states" not in name}  # it counts otherwise
    counted = {re.split(r"[:/]", name)[-1]: value for name, value in sorted(values.items())}
    named = NUMBERED.search(name)
    by_name = int(named["number"]) if named else None
    inside = [int(counted[key]) for key in _STEP_KEYS if counted.get(key, "").isdecimal()]
    if named and named["word"] not in ("checkpoint", "ckpt"):
        return by_name
    return inside[0] if inside else by_name


def _below(files: Files, folder: str, root: str) -> Iterator[str]:
    for name in files.names(folder):
        path = f"{folder}/{name}"
        if files.is_alias(path, root):
            continue
        if kind(files, path):
            yield path
        elif files.is_dir(path):
            yield from _below(files, path, root)


def _only_holds_checkpoints(files: Files, path: str, names: list[str]) -> bool:
    """Whether a folder with a number in its name is one that others lie in: `run-step-1/checkpoint-10/`."""
    inner = [name for name in names if files.is_dir(f"{path}/{name}")]
    return bool(inner) and len(inner) == len(names) and any(NUMBERED.search(name) for name in inner)


def _nothing(name: str, found: Checkpoint) -> Problem:
    """Of a checkpoint in which nothing was found to read."""
    if found.unread:
        text = f"{name}: it holds files of the type {', '.join(found.unread)}, which are not read"
        return Problem(Trouble.LIMIT, text, found.path)
    return Problem(Trouble.TORN, f"{name}: empty", found.path)


def _by_content(files: Files, path: str) -> str:
    """Of a file that the user named, whatever its name."""
    return "torch" if files.read(path, 0, 2) in (b"PK", b"\x80\x02") else "safetensors"
