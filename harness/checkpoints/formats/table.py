"""The table of all formats, made from their declarations: the formats of torchaos, in this folder, and those of other
packages, by entry points of the group `torchaos.formats`."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from torchaos.harness import registry
from torchaos.harness.interfaces import UsageError

from ..files import Files
from ..layout import Unreadable, torn, unknown
from . import foreign

if TYPE_CHECKING:
    from .format import Format

_JSON, _START = ".json", 512  # bytes, in which the name of an archive's first record is
# Types of files that often hold tensors. Files of these types that no format reads are reported.
_KNOWN = (".npz", ".npy", ".h5", ".hdf5", ".msgpack", ".gz", ".zst", ".tar", ".zip", ".gguf", ".onnx", ".params")


@cache
def table() -> tuple[Format, ...]:
    """All formats, specialised formats before general ones. Raises UsageError if a format can't be loaded, or if there
    is none."""
    made = [found() for found in registry.all_of("formats").values()]
    if not made:
        raise UsageError(
            "no checkpoint format is installed: the metadata of torchaos is older than its code; install it again"
        )
    return tuple(sorted(made, key=lambda form: (form.asked, form.name)))


def named(name: str) -> Format | None:
    return next((form for form in table() if form.name == name), None)


def of_name(name: str) -> Format | None:
    is_own = not name.startswith("._")  # macOS puts such a file beside another, on a file system that is not its own
    return next((form for form in table() if is_own and name.endswith(form.suffixes)), None)


def of_start(files: Files, path: str, in_folder: bool = False) -> Format | None:
    """The format of a file, by the file's first bytes. None if no format fits. `in_folder`: of any file in the folder
    of a checkpoint, where other archives may lie."""
    try:
        start = files.read(path, 0, _START)
    except OSError:
        if in_folder:
            return None  # such as a broken link: nothing shows that it is a part of the checkpoint
        raise
    if _of_part(path) or (in_folder and start.startswith(foreign.ZIP) and b"/data.pkl" not in start):
        return None
    return next((form for form in table() if form.is_file(start)), None)


def of_no_format(files: Files, path: str, size: int) -> Unreadable:
    """Why a file that no format reads on its own is not read."""
    if not size:
        return torn("empty")
    if form := _of_part(path):
        return unknown(f"a part of a checkpoint ({form.name}): give its folder")
    return foreign.instead(files, path, size) or unknown("its first bytes are of no kind that is known")


def _of_part(path: str) -> Format | None:
    """The format of which a file is a part that can't be read alone, by the file's name."""
    name = posixpath.basename(path)
    return next((form for form in table() if name in form.metadata or (form.parts and name.endswith(form.parts))), None)


def of_folder(files: Files, folder: str, names: Sequence[str]) -> Format | None:
    """The format of a folder, by the names in it."""
    return next((form for form in table() if form.is_folder(files, folder, names)), None)


def may_hold_tensors(path: str) -> bool:
    return path.endswith(tuple(end for form in table() for end in (*form.suffixes, *form.parts, *form.metadata)))


def role_of(path: str) -> str:
    """The role of a file in a checkpoint: metadata, data, or other."""
    name = posixpath.basename(path)
    if name.endswith(_JSON) or any(name in form.metadata for form in table()):
        return "metadata"
    return "data" if name.endswith(tuple(end for form in table() for end in (*form.suffixes, *form.parts))) else "other"


def unread_type(name: str) -> str | None:
    """The type of a file that may hold tensors but is read by no format. None for any other file."""
    return None if of_name(name) else next((end for end in _KNOWN if name.lower().endswith(end)), None)


def tracker_names() -> tuple[str, ...]:
    """The names of files beside checkpoints that name the newest checkpoint, such as DeepSpeed's `latest`."""
    return tuple(sorted({form.tracker for form in table() if form.tracker}))
