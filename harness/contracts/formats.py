"""The interface of a checkpoint format."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Sequence


class CheckpointFormat(Protocol):
    """How checkpoints of one format are recognised and read. Inherit from `Format` in checkpoints/formats/format.py: it
    has a default for everything but the name."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    def is_folder(self, files: Any, folder: str, names: Sequence[str]) -> bool: ...

    def read_file(self, files: Any, path: str, size: int, into: Any, prefix: str = "") -> None: ...

    def read_folder(self, files: Any, folder: str, into: Any, prefix: str = "") -> None: ...
