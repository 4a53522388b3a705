"""What a checkpoint format declares. A new format is one file with a subclass of `Format`: nothing else names it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from ..files import Files
from ..layout import Checkpoint, Unreadable
from . import folders


class Format:
    """A format is recognised by the name of a file (`suffixes`), by its first bytes (`starts`), or by the names in a
    folder (`is_folder`). Everything except the name has a default.

    Readers fill `into`: tensors, values, checksums, and problems. The names of these entries begin with `prefix`.
    Readers raise Unreadable or OSError if nothing more can be read."""

    name: ClassVar[str]  # as `torchaos verify` prints it
    asked: ClassVar[int] = 50  # formats are asked in this order, from the lowest: the more special first

    suffixes: ClassVar[tuple[str, ...]] = ()  # of files that are read one by one
    starts: ClassVar[tuple[bytes, ...]] = ()  # the first bytes of such a file, for a file with another name
    parts: ClassVar[tuple[str, ...]] = ()  # suffixes of files that hold tensors, and are only read with other files
    metadata: ClassVar[tuple[str, ...]] = ()  # names of files that say where tensors are in other files
    tracker: ClassVar[str] = ""  # the name of the file beside the checkpoints that names the newest of them
    one_save: ClassVar[bool] = False  # one save writes all files of a checkpoint

    # What a resume needs, in words, and a pattern that finds it: among the paths of files, relative to the checkpoint,
    # or among the names of tensors and values. A format that declares neither is judged by what such names usually are.
    needed_files: ClassVar[Mapping[str, str]] = {}
    needed_entries: ClassVar[Mapping[str, str]] = {}
    model_only: ClassVar[bool] = False  # it can't hold more than the tensors of a model

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        """Whether a folder with these names in it is a checkpoint of this format."""
        return False

    def refines(self, found: Checkpoint) -> bool:
        """Whether a checkpoint that was read as `found.format` is, by its contents, of this format."""
        return False

    def read_file(self, files: Files, path: str, size: int, into: Checkpoint, prefix: str = "") -> None:
        """Read one file. `size`: bytes."""
        raise Unreadable(f"a file alone is not of the format {self.name}")

    def read_folder(self, files: Files, folder: str, into: Checkpoint, prefix: str = "") -> None:
        """Reads a folder. By default, reads each file and each folder in it by its own format."""
        folders.read_folder(files, folder, into, prefix)

    def read_parts(
        self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str
    ) -> Collection[str]:
        """Reads the files of any folder that only make sense together. Returns the names that need no other reader."""
        return ()

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        """Note which files of a set are missing, after all files of a folder were read. Every folder is checked by
        every format."""
