"""The base class of checkpoint formats. A new format is one file with a subclass of `Format`. No other file names
it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from ..files import Files
from ..layout import Checkpoint, Unreadable
from . import folders


class Format:
    """A checkpoint format. It is recognised by the name of a file (`suffixes`), by the first bytes of a file
    (`starts`), or by the names in a folder (`is_folder`). Everything except `name` has a default.

    Readers fill `into`: tensors, values, checksums, and problems. The names of these entries begin with `prefix`. A
    reader raises Unreadable or OSError if it can't read any further."""

    name: ClassVar[str]  # as `torchaos verify` prints it
    asked: ClassVar[int] = 50  # formats are tried in this order, from the lowest; special formats first

    suffixes: ClassVar[tuple[str, ...]] = ()  # suffixes of files that are read one by one
    starts: ClassVar[tuple[bytes, ...]] = ()  # the first bytes of such a file, for a file with another name (is_file)
    parts: ClassVar[tuple[str, ...]] = ()  # suffixes of files that hold tensors, and can only be read with other files
    metadata: ClassVar[tuple[str, ...]] = ()  # names of files that give the places of tensors in other files
    tracker: ClassVar[str] = ""  # the name of a file beside the checkpoints that names the newest checkpoint
    one_save: ClassVar[bool] = False  # one save writes all files of a checkpoint

    # The parts that a resume needs, in words, each with a pattern: for the paths of files, relative to the checkpoint,
    # or for the names of tensors and values. A format that declares neither is judged by common names of such parts.
    needed_files: ClassVar[Mapping[str, str]] = {}
    needed_entries: ClassVar[Mapping[str, str]] = {}
    model_only: ClassVar[bool] = False  # it can only hold the tensors of a model

    def is_file(self, start: bytes) -> bool:
        """Whether a file whose name shows no format is of this format, by its first bytes (at most 512)."""
        return bool(self.starts) and start.startswith(self.starts)

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        """Whether a folder with these names in it is a checkpoint of this format."""
        return False

    def refines(self, found: Checkpoint) -> bool:
        """Whether a checkpoint that was read as `found.format` is of this format, judged by its contents."""
        return False

    def tracked(self, text: str) -> str | None:
        """The name of the checkpoint that a tracker file with this text names. None if the format writes no such
        text."""
        return text or None

    def read_file(self, files: Files, path: str, size: int, into: Checkpoint, prefix: str = "") -> None:
        """Reads one file. `size`: bytes."""
        raise Unreadable(f"a single file can't be of the format {self.name}")

    def read_folder(self, files: Files, folder: str, into: Checkpoint, prefix: str = "") -> None:
        """Reads a folder. By default, each file and each folder in it is read by its own format."""
        folders.read_folder(files, folder, into, prefix)

    def read_parts(
        self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str
    ) -> Collection[str]:
        """Reads files that can only be read together, in a folder of any format. Returns the names that no other reader
        must read."""
        return ()

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        """Adds a problem for each missing file of a set. It is called for every folder and every format, after all
        files of the folder were read."""


# The parts of a checkpoint that a resume needs, and which of them are missing. Formats declare the parts. For a format
# without a declaration, they are guessed from the names of the entries. A part that is missing according to a guess is
# reported, but is no damage.

_GUESSED = {
    "the optimizer's state": re.compile(r"optim|exp_avg|momentum|(^|[.:])opt\b", re.I),
    "the learning rate schedule": re.compile(r"sched|last_epoch|(^|[.:_])lr", re.I),
    "the state of the random number generators": re.compile(r"rng|random|seed|mt19937", re.I),
    "how far training was": re.compile(r"step|iter|epoch|consumed", re.I),
}
_ALONE = ("the optimizer's state", "how far training was")
_OF_OPTIMIZER = re.compile(
    r"(^|[.:])state\.\d+\.|exp_avg|momentum_buffer|(^|[.:/])(optimizer|optim)([._:/]|$|_states?)", re.I
)
_PART = re.compile(r"(?<![a-z])(rank|shard|part|worker|proc|tp|pp|dp|mp|ep)[-_]?\d|\d[-_]of[-_]\d|^\d+$|\.\d+$", re.I)
_OF_RANK = re.compile(r"(^|[/_-])rank[-_]?\d+$", re.I)


def missing(form: Format, found: Checkpoint) -> list[str]:
    """The missing parts in words; empty if nothing is missing."""
    if form.model_only:
        return ["the optimizer's state: this format holds tensors of a model only"]
    if form.needed_files:
        return _lacking(form.needed_files, [file.path[len(found.path) + 1 :] for file in found.files])
    names = [*found.tensors, *found.values]
    if form.needed_entries:
        return _lacking(form.needed_entries, names)
    if not holds_a_model(found):
        return []  # a part of a checkpoint: what it lacks is in other files
    return [part for part, pattern in _GUESSED.items() if not any(map(pattern.search, names))]


def holds_a_model(found: Checkpoint) -> bool:
    """Whether there are tensors other than those of an optimizer, by their names, and those that hold the state of a
    generator, by their type. Such a file or folder is only a part of a checkpoint."""
    return any(
        not _OF_OPTIMIZER.search(name) and not (tensor.dtype == "uint8" and len(tensor.shape) == 1)
        for name, tensor in found.tensors.items()
    )


def stands_alone(found: Checkpoint) -> bool:
    """Whether a file holds by itself what a checkpoint consists of, and does not name itself a part of several."""
    names = [*found.tensors, *found.values]
    lacks = [part for part in _ALONE if not any(map(_GUESSED[part].search, names))]
    return holds_a_model(found) and not is_part(found.path) and not lacks


def one_stands_alone(found: Checkpoint) -> bool:
    """Whether one file of a folder stands alone, or one folder of a known format in it, and no other file is one of
    several parts."""
    names = [file.path[len(found.path) + 1 :] for file in found.files]
    loose = [name for name in names if not name.startswith(tuple(found.inner))]
    units = [*found.inner, *(f"{name}:" for name in loose)]
    return not any(map(is_part, loose)) and any(stands_alone(_part(found, unit)) for unit in units)


def _part(found: Checkpoint, head: str) -> Checkpoint:
    """What of a folder is in one of its files or folders."""
    part = Checkpoint(head, found.format)
    part.tensors = {name: tensor for name, tensor in found.tensors.items() if name.startswith(head)}
    part.values = {name: value for name, value in found.values.items() if name.startswith(head)}
    return part


def is_part(path: str) -> bool:
    """Whether the name of a file, or of the folder of a rank in which it is, says that it is one of several parts, such
    as `model_rank_0.pt`, `state.0`, `0`, or `mp_rank_00/last.ckpt`."""
    folder, name = posixpath.split(path)
    return bool(_PART.search(name) or _OF_RANK.search(folder))


def _lacking(wanted: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [part for part, pattern in wanted.items() if not any(re.search(pattern, name) for name in names)]
