"""Changes to a file of a checkpoint: one class for each kind of change, and the fields with which the journal records
it."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

SHORT = 64  # bytes; longer contents are recorded by their digest


@dataclass(frozen=True)
class Edit(ABC):
    """One change to one file."""

    op: ClassVar[str]
    path: Path

    @abstractmethod
    def data(self) -> Mapping[str, Any]:
        """The fields of the journal's event. Must be called before the change."""

    @abstractmethod
    def __call__(self) -> None: ...


@dataclass(frozen=True)
class Write(Edit):
    """Writes `new` over the bytes at `offset`. The length of the file does not change."""

    op = "write"
    offset: int
    new: bytes
    part: str = ""  # the tensor or the part of the file that is hit

    def data(self) -> Mapping[str, Any]:
        old = read(self.path, self.offset, len(self.new))
        return {"offset": self.offset, "length": len(self.new), "part": self.part, **_before_after(old, self.new)}

    def __call__(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self.offset)
            file.write(self.new)


@dataclass(frozen=True)
class Zero(Edit):
    """Writes zeros over `length` bytes at `offset`."""

    op = "zero"
    offset: int
    length: int

    def data(self) -> Mapping[str, Any]:
        return {"offset": self.offset, "length": self.length, "before": digest(self.path, self.offset, self.length)}

    def __call__(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self.offset)
            for start in range(0, self.length, 1 << 20):
                file.write(bytes(min(1 << 20, self.length - start)))


@dataclass(frozen=True)
class Cut(Edit):
    """Ends the file at `length` bytes."""

    op = "cut"
    length: int

    def data(self) -> Mapping[str, Any]:
        return {"offset": self.length, "length": self.path.stat().st_size - self.length}

    def __call__(self) -> None:
        os.truncate(self.path, self.length)


@dataclass(frozen=True)
class Swap(Edit):
    """Replaces the file's bytes by the bytes of another file."""

    op = "swap"
    source: Path

    def data(self) -> Mapping[str, Any]:
        return {"source": str(self.source), "before": digest(self.path), "after": digest(self.source)}

    def __call__(self) -> None:
        with open(self.source, "rb") as new, open(self.path, "r+b") as file:
            shutil.copyfileobj(new, file, 1 << 20)
            file.truncate()


@dataclass(frozen=True)
class Text(Edit):
    """Replaces the contents of a small file, such as a tracker."""

    op = "text"
    new: bytes

    def data(self) -> Mapping[str, Any]:
        return _before_after(self.path.read_bytes(), self.new)

    def __call__(self) -> None:
        with open(self.path, "r+b") as file:
            file.write(self.new)
            file.truncate()


@dataclass(frozen=True)
class Remove(Edit):
    op = "remove"

    def data(self) -> Mapping[str, Any]:
        return {"length": self.path.stat().st_size, "before": digest(self.path)}

    def __call__(self) -> None:
        self.path.unlink()


@dataclass(frozen=True)
class Mode(Edit):
    """Changes the permissions of the file, but not its contents."""

    op = "mode"
    mode: int

    def data(self) -> Mapping[str, Any]:
        return {"before": f"{stat.S_IMODE(self.path.stat().st_mode):04o}", "after": f"{self.mode:04o}"}

    def __call__(self) -> None:
        self.path.chmod(self.mode)


def in_words(fields: Mapping[str, Any]) -> str:
    """The damage in words. `fields`: the data of the event that records it."""
    path, name = Path(fields["file"]), Path(fields["checkpoint"])
    where = f" at byte {fields['offset']}" if "offset" in fields else ""
    part = f" ({fields['part']})" if fields.get("part") else ""
    done = {"write": "was changed", "zero": "reads as zeros", "cut": "was cut off", "swap": "is another file",
            "remove": "was removed", "text": "was changed", "mode": "may not be read"}  # fmt: skip
    return f"{os.path.relpath(path, name.parent)}{part} {done[fields['op']]}{where}"


def read(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def digest(path: Path, offset: int = 0, length: int | None = None) -> str:
    summary, left = hashlib.sha256(), path.stat().st_size if length is None else length
    with open(path, "rb") as file:
        file.seek(offset)
        while block := file.read(min(left, 1 << 20)):
            summary.update(block)
            left -= len(block)
    return "sha256:" + summary.hexdigest()


def _before_after(old: bytes, new: bytes) -> dict[str, str]:
    def recorded(data: bytes) -> str:
        return data.hex() if len(data) <= SHORT else "sha256:" + hashlib.sha256(data).hexdigest()

    return {"before": recorded(old), "after": recorded(new)}
