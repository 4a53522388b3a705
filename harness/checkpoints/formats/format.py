"""The base class of checkpoint formats. A new format is one file with a subclass of `Format`. No other file names
it."""

from __future__ import annotations

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
