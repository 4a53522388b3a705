"""Folders with a step in their names, such as `step-10/`, that belong to no other format. Their files are read one by
one."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from ..files import Files
from .format import Format
from .names import NUMBERED


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
