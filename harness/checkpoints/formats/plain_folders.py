"""Folders that belong to no other format: with an index, `model.safetensors.index.json`, that names the file of each
tensor, with numbered files, or with a step in their names, such as `step-10/`, whose files are read one by one."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from ..files import Files
from ..layout import Checkpoint, Problem, Trouble, Unreadable
from .format import NUMBERED, Format, note_missing, read_json

_OF_SET = re.compile(r"\.(?:safetensors|bin)\.index\.json$|-\d{5,6}-of-\d{5,6}\.(?:safetensors|bin|pth?)$")


class Sharded(Format):
    """Sharded safetensors or torch.save files, with an index or numbered `-00001-of-00003`."""

    name = "sharded"
    asked = 90
    model_only = True

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return any(map(_OF_SET.search, names))

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        for name in names:
            if name.endswith(".index.json"):
                _check_index(files, folder, name, set(names), into, prefix)


def _check_index(files: Files, folder: str, name: str, have: set[str], into: Checkpoint, prefix: str) -> None:
    """Checks that every tensor of an index is in the file that the index names for it."""
    try:
        weights = read_json(files, f"{folder}/{name}").get("weight_map")
    except (Unreadable, OSError):
        return  # the reader of the file itself has reported it
    if weights is None and not Sharded().is_folder(files, folder, [name]):
        return  # an index of something else
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        into.problems.append(Problem(Trouble.UNREADABLE, f"{prefix}{name}: it has no weight_map", f"{folder}/{name}"))
        return
    note_missing(into, prefix, sorted(set(weights.values())), have)
    for tensor, file in weights.items():
        if file in have and f"{prefix}{file}:{tensor}" not in into.tensors:
            text = f"{prefix}{file}: it lacks {tensor}, which {name} says is in it"
            into.problems.append(Problem(Trouble.TORN, text, f"{folder}/{file}", tensor))
            return


class Numbered(Format):
    """A folder with a step in its name that belongs to no other format."""

    name = "dir"
    asked = 100

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return bool(NUMBERED.search(posixpath.basename(folder))) and not _only_holds_checkpoints(files, folder, names)


def _only_holds_checkpoints(files: Files, path: str, names: Sequence[str]) -> bool:
    """Whether a folder with a number in its name contains only other checkpoints, like `run-step-1/checkpoint-10/`."""
    inner = [name for name in names if files.is_dir(f"{path}/{name}")]
    return bool(inner) and len(inner) == len(names) and any(NUMBERED.search(name) for name in inner)
