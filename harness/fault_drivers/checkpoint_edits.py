"""Changes to the files of a checkpoint. There is one class for each kind of change, which also gives the fields for the
journal. The functions after them choose the place of a change, from the layout of the checkpoint and a random
stream."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import stat
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torchaos.harness.checkpoints.formats.format_table import tracker_names
from torchaos.harness.checkpoints.layout import Checkpoint, Extent, TensorEntry
from torchaos.harness.interfaces import ChaosError

SHORT = 64  # bytes; longer contents are recorded by their digest


@dataclass(frozen=True)
class Edit(ABC):
    """One change to one file."""

    op: ClassVar[str]
    path: Path

    @abstractmethod
    def data(self) -> Mapping[str, Any]:
        """The fields for the event in the journal. Must be called before the change."""

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
    """Cuts the file off after `length` bytes."""

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


PAGE = 4096
# The bytes of a NaN by dtype, least significant byte first.
_NAN = {
    "float64": struct.pack("<d", float("nan")), "float32": struct.pack("<f", float("nan")),
    "float16": struct.pack("<e", float("nan")), "bfloat16": b"\xc0\x7f",
}  # fmt: skip


@dataclass(frozen=True)
class Stretch:
    """Adjacent bytes of one file that belong to one tensor, or to the metadata."""

    extent: Extent
    part: str


def stretch(checkpoint: Checkpoint, place: Literal["tensor", "metadata"], draw: random.Random) -> Stretch:
    """The bytes to change: a part of a tensor (each tensor is equally likely), or bytes that describe tensors. Raises
    ChaosError if the checkpoint has no such bytes."""
    if place == "tensor":
        return _tensor(checkpoint, sorted(checkpoint.tensors.values(), key=lambda entry: entry.name), draw)
    files = [file for file in checkpoint.files if file.role == "metadata" and file.size]
    if files:
        file = draw.choice(files)
        return Stretch(Extent(file.path, 0, file.size), "metadata")
    gaps = [gap for path in _data_files(checkpoint) for gap in _gaps(checkpoint, path)]
    if not gaps:
        raise ChaosError(f"{checkpoint.path}: it has no bytes that describe its tensors")
    return Stretch(draw.choice(gaps), "metadata")


def flips(where: Stretch, bits: int, draw: random.Random) -> list[Edit]:
    extent = where.extent
    masks: dict[int, int] = {}
    for bit in draw.sample(range(8 * extent.length), min(bits, 8 * extent.length)):
        masks[bit // 8] = masks.get(bit // 8, 0) | 1 << bit % 8
    path = Path(extent.file)
    return [
        Write(path, at, bytes([read(path, at, 1)[0] ^ mask]), where.part)
        for at, mask in sorted((extent.offset + byte, mask) for byte, mask in masks.items())
    ]


def nan(checkpoint: Checkpoint, fix_crc: bool, draw: random.Random) -> list[Edit]:
    entries = sorted(checkpoint.tensors.values(), key=lambda entry: entry.name)
    floats = [entry for entry in entries if entry.dtype in _NAN]
    where = _tensor(checkpoint, floats, draw)
    new = _NAN[checkpoint.tensors[where.part].dtype]
    extent, path = where.extent, Path(where.extent.file)
    at = extent.offset + draw.randrange(extent.length // len(new)) * len(new)
    edits: list[Edit] = [Write(path, at, new, where.part)]
    return edits + (_crc_that_fits(checkpoint, path, at, new) if fix_crc else [])


def zeros(path: Path, size: int, draw: random.Random) -> Edit:
    """Sets one block of `size` bytes to zero, which is not zero yet. Raises ChaosError if the file has no such
    block."""
    length = path.stat().st_size
    blocks = list(range(0, length, size))
    draw.shuffle(blocks)
    for start in blocks[:1000]:
        if any(read(path, start, size)):
            return Zero(path, start, min(size, length - start))
    raise ChaosError(f"{path}: all its blocks hold zeros already")


def torn(path: Path, draw: random.Random) -> Edit:
    """Sets the file to zero from a random page to its end."""
    length = path.stat().st_size
    start = draw.randrange(0, length, PAGE) if length > PAGE else length // 2
    return Zero(path, start, length - start)


def cut(path: Path, keep: float | None, draw: random.Random) -> Edit:
    length = path.stat().st_size
    return Cut(path, draw.randrange(length) if keep is None else min(int(length * keep), length - 1))


def shard(checkpoint: Checkpoint, draw: random.Random) -> Path:
    """A file that holds tensors. Raises ChaosError if there is none."""
    files = _data_files(checkpoint)
    if not files:
        raise ChaosError(f"{checkpoint.path}: no file in it holds tensors")
    return Path(draw.choice(files))


def metadata(checkpoint: Checkpoint, draw: random.Random) -> Path:
    described = [file.path for file in checkpoint.files if file.role == "metadata"]
    files = [path for path in described if path.endswith((".metadata", ".index.json"))] or described
    if not files:
        raise ChaosError(f"{checkpoint.path}: no separate file in it describes its tensors")
    return Path(draw.choice(files))


def partial(checkpoint: Checkpoint, draw: random.Random) -> list[Edit]:
    """Makes the files look like those of an interrupted save: no metadata, which is written last, and only half of the
    other files, one of them cut off."""
    data = [Path(path) for path in _data_files(checkpoint)]
    described = [Path(file.path) for file in checkpoint.files if file.role == "metadata"]
    draw.shuffle(data)
    missing = data[: len(data) // 2]
    return [*map(Remove, described), *map(Remove, missing), cut(data[-1], None, draw)]


def stale(checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Edit:
    """Replaces a file by the file with the same name in the next older checkpoint. A checkpoint that is a single file
    is replaced as a whole."""
    older = next((other for other in _older(checkpoint, others)), None)
    if older is None:
        raise ChaosError(f"{checkpoint.path}: there is no older checkpoint to take a file from")
    pairs = [(Path(path), _same_in(Path(path), checkpoint, older)) for path in _data_files(checkpoint)]
    fit = [(path, source) for path, source in pairs if source and source.is_file() and digest(source) != digest(path)]
    if not fit:
        raise ChaosError(f"{checkpoint.path}: no file of {older.path} has the same name and other contents")
    return Swap(*draw.choice(fit))


def foreign(checkpoint: Checkpoint, draw: random.Random) -> Edit:
    """Replaces the file of one rank by the file of another rank in the same checkpoint. Two files whose names differ
    only in a number belong to two ranks."""
    kin: dict[str, list[Path]] = {}
    for path in map(Path, _data_files(checkpoint)):
        kin.setdefault(re.sub(r"\d+", "#", path.name), []).append(path)
    pairs = [(a, b) for some in kin.values() for a in some for b in some if a != b and digest(a) != digest(b)]
    if not pairs:
        raise ChaosError(f"{checkpoint.path}: no two files in it are those of two ranks")
    return Swap(*draw.choice(pairs))


def tracker(checkpoint: Checkpoint, others: Sequence[Checkpoint], how: Literal["empty", "stale"]) -> Edit:
    names = tracker_names()
    beside = [Path(checkpoint.path).parent / name for name in names]
    path = next((path for path in beside if path.is_file()), None)
    if path is None:
        known = ", ".join(names)
        raise ChaosError(f"{checkpoint.path}: no file beside it says which checkpoint is the newest ({known})")
    if how == "empty":
        return Text(path, b"")
    older = next((other for other in _older(checkpoint, others)), None)
    if older is None:
        raise ChaosError(f"{checkpoint.path}: there is no older checkpoint that {path.name} could name")
    is_number = path.read_bytes().strip().isdigit()
    return Text(path, (str(older.step) if is_number else Path(older.path).name).encode())


def _tensor(checkpoint: Checkpoint, entries: Sequence[TensorEntry], draw: random.Random) -> Stretch:
    stored = [entry for entry in entries if any(extent.length for extent in entry.extents)]
    if not stored:
        raise ChaosError(f"{checkpoint.path}: it holds no tensor of that kind")
    entry = draw.choice(stored)
    return Stretch(draw.choice([extent for extent in entry.extents if extent.length]), entry.name)


def _data_files(checkpoint: Checkpoint) -> list[str]:
    return sorted({extent.file for entry in checkpoint.tensors.values() for extent in entry.extents if extent.length})


def _gaps(checkpoint: Checkpoint, path: str) -> Iterator[Extent]:
    used = sorted({(e.offset, e.end) for entry in checkpoint.tensors.values() for e in entry.extents if e.file == path})
    at = 0
    for start, end in [*used, (Path(path).stat().st_size, 0)]:
        if start > at:
            yield Extent(path, at, start - at)
        at = max(at, end)


def _older(checkpoint: Checkpoint, others: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    """The complete checkpoints that are older, the newest first."""
    paths = [other.path for other in others]
    return others[paths.index(checkpoint.path) + 1 :]


def _same_in(path: Path, checkpoint: Checkpoint, other: Checkpoint) -> Path | None:
    if str(path) == checkpoint.path:
        return Path(other.path)
    return Path(other.path) / path.relative_to(checkpoint.path) if path.is_relative_to(checkpoint.path) else None


def _crc_that_fits(checkpoint: Checkpoint, path: Path, at: int, new: bytes) -> list[Edit]:
    """Writes the right CRC of a changed record to both places where a zip file stores it: behind the record, and in the
    directory at the end (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.9 and 4.3.12)."""
    of_file = (kept for kept in checkpoint.checksums if kept.extent.file == str(path))
    kept = next((kept for kept in of_file if kept.extent.offset <= at < kept.extent.end), None)
    if kept is None:
        return []
    record = bytearray(read(path, kept.extent.offset, kept.extent.length))
    record[at - kept.extent.offset : at - kept.extent.offset + len(new)] = new
    old, fits = struct.pack("<I", kept.crc), struct.pack("<I", zlib.crc32(record))
    start = kept.extent.end
    rest = read(path, start, path.stat().st_size - start)
    behind = [start + 4] if rest[:8] == b"PK\x07\x08" + old else []
    listed = next(
        (m.start() for m in re.finditer(re.escape(b"PK\x01\x02"), rest) if rest[m.start() + 16 :][:4] == old), None
    )
    if listed is None:
        raise ChaosError(f"{path}: the place where the CRC of {kept.what} is kept was not found")
    return [Write(path, place, fits, "CRC") for place in (*behind, start + listed + 16)]
