"""Where in a checkpoint damage lands: from its layout and a random stream to edits. Changes nothing itself."""

from __future__ import annotations

import random
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchaos.harness.checkpoints.formats.table import tracker_names
from torchaos.harness.checkpoints.layout import Checkpoint, Extent, TensorEntry
from torchaos.harness.contracts import ChaosError
from torchaos.harness.mechanics.checkpoints.edits import Cut, Edit, Remove, Swap, Text, Write, Zero, digest, read

PAGE = 4096
# Of one NaN, least significant byte first.
_NAN = {
    "float64": struct.pack("<d", float("nan")), "float32": struct.pack("<f", float("nan")),
    "float16": struct.pack("<e", float("nan")), "bfloat16": b"\xc0\x7f",
}  # fmt: skip


@dataclass(frozen=True)
class Stretch:
    """Bytes of one file that belong together."""

    extent: Extent
    part: str


def stretch(one: Checkpoint, place: Literal["tensor", "metadata"], draw: random.Random) -> Stretch:
    """One tensor's bytes in one file, each tensor as likely; or bytes that describe tensors."""
    if place == "tensor":
        return _tensor(one, sorted(one.tensors.values(), key=lambda entry: entry.name), draw)
    files = [file for file in one.files if file.role == "metadata" and file.size]
    if files:
        file = draw.choice(files)
        return Stretch(Extent(file.path, 0, file.size), "metadata")
    gaps = [gap for path in _data_files(one) for gap in _gaps(one, path)]
    if not gaps:
        raise ChaosError(f"{one.path}: nothing in it describes its tensors")
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


def nan(one: Checkpoint, fix_crc: bool, draw: random.Random) -> list[Edit]:
    floats = [entry for entry in sorted(one.tensors.values(), key=lambda entry: entry.name) if entry.dtype in _NAN]
    where = _tensor(one, floats, draw)
    new = _NAN[one.tensors[where.part].dtype]
    extent, path = where.extent, Path(where.extent.file)
    at = extent.offset + draw.randrange(extent.length // len(new)) * len(new)
    edits: list[Edit] = [Write(path, at, new, where.part)]
    return edits + (_crc_that_fits(one, path, at, new) if fix_crc else [])


def zeros(path: Path, size: int, draw: random.Random) -> Edit:
    """A block that is not zero already, if the file has one."""
    length = path.stat().st_size
    blocks = list(range(0, length, size))
    draw.shuffle(blocks)
    for start in blocks[:1000]:
        if any(read(path, start, size)):
            return Zero(path, start, min(size, length - start))
    raise ChaosError(f"{path}: no block of it holds anything but zeros")


def torn(path: Path, draw: random.Random) -> Edit:
    """Zeros from some page on, to the end."""
    length = path.stat().st_size
    start = draw.randrange(0, length, PAGE) if length > PAGE else length // 2
    return Zero(path, start, length - start)


def cut(path: Path, keep: float | None, draw: random.Random) -> Edit:
    length = path.stat().st_size
    return Cut(path, draw.randrange(length) if keep is None else min(int(length * keep), length - 1))


def shard(one: Checkpoint, draw: random.Random) -> Path:
    """A file that holds tensors. Raises ChaosError where there is none."""
    files = _data_files(one)
    if not files:
        raise ChaosError(f"{one.path}: no file in it holds tensors")
    return Path(draw.choice(files))


def metadata(one: Checkpoint, draw: random.Random) -> Path:
    described = [file.path for file in one.files if file.role == "metadata"]
    files = [path for path in described if path.endswith((".metadata", ".index.json"))] or described
    if not files:
        raise ChaosError(f"{one.path}: it has no file of its own that describes its tensors")
    return Path(draw.choice(files))


def partial(one: Checkpoint, draw: random.Random) -> list[Edit]:
    """Of a folder: metadata, which is written last, is missing, and so is half of the rest; one file is cut off."""
    data = [Path(path) for path in _data_files(one)]
    described = [Path(file.path) for file in one.files if file.role == "metadata"]
    draw.shuffle(data)
    missing = data[: len(data) // 2]
    return [*map(Remove, described), *map(Remove, missing), cut(data[-1], None, draw)]


def stale(one: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Edit:
    """The file of the same name in the next older checkpoint, or of the older one where a checkpoint is a file."""
    older = next((other for other in _older(one, others)), None)
    if older is None:
        raise ChaosError(f"{one.path}: there is no older checkpoint to take a file from")
    pairs = [(Path(path), _same_in(Path(path), one, older)) for path in _data_files(one)]
    fit = [(path, source) for path, source in pairs if source and source.is_file() and digest(source) != digest(path)]
    if not fit:
        raise ChaosError(f"{one.path}: no file of {older.path} has the same name and other contents")
    return Swap(*draw.choice(fit))


def foreign(one: Checkpoint, draw: random.Random) -> Edit:
    """Two files whose names differ in a number alone are those of two ranks, or of two parts."""
    kin: dict[str, list[Path]] = {}
    for path in map(Path, _data_files(one)):
        kin.setdefault(re.sub(r"\d+", "#", path.name), []).append(path)
    pairs = [(a, b) for some in kin.values() for a in some for b in some if a != b and digest(a) != digest(b)]
    if not pairs:
        raise ChaosError(f"{one.path}: no two files in it are those of two ranks")
    return Swap(*draw.choice(pairs))


def tracker(one: Checkpoint, others: Sequence[Checkpoint], how: Literal["empty", "stale"]) -> Edit:
    names = tracker_names()
    beside = [Path(one.path).parent / name for name in names]
    path = next((path for path in beside if path.is_file()), None)
    if path is None:
        raise ChaosError(f"{one.path}: no file beside it says which checkpoint is the newest ({', '.join(names)})")
    if how == "empty":
        return Text(path, b"")
    older = next((other for other in _older(one, others)), None)
    if older is None:
        raise ChaosError(f"{one.path}: there is no older checkpoint that {path.name} could name")
    is_number = path.read_bytes().strip().isdigit()
    return Text(path, (str(older.step) if is_number else Path(older.path).name).encode())


def _tensor(one: Checkpoint, entries: Sequence[TensorEntry], draw: random.Random) -> Stretch:
    stored = [entry for entry in entries if any(extent.length for extent in entry.extents)]
    if not stored:
        raise ChaosError(f"{one.path}: it holds no tensor of that kind")
    entry = draw.choice(stored)
    return Stretch(draw.choice([extent for extent in entry.extents if extent.length]), entry.name)


def _data_files(one: Checkpoint) -> list[str]:
    return sorted({extent.file for entry in one.tensors.values() for extent in entry.extents if extent.length})


def _gaps(one: Checkpoint, path: str) -> Iterator[Extent]:
    """What of a file is no tensor."""
    used = sorted({(e.offset, e.end) for entry in one.tensors.values() for e in entry.extents if e.file == path})
    at = 0
    for start, end in [*used, (Path(path).stat().st_size, 0)]:
        if start > at:
            yield Extent(path, at, start - at)
        at = max(at, end)


def _older(one: Checkpoint, others: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    """The complete ones behind it, newest first."""
    paths = [other.path for other in others]
    return others[paths.index(one.path) + 1 :]


def _same_in(path: Path, one: Checkpoint, other: Checkpoint) -> Path | None:
    if str(path) == one.path:
        return Path(other.path)
    return Path(other.path) / path.relative_to(one.path) if path.is_relative_to(one.path) else None


def _crc_that_fits(one: Checkpoint, path: Path, at: int, new: bytes) -> list[Edit]:
    """Both places in which a zip keeps the CRC of a record: behind it, and in the directory at the end
    (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.9 and 4.3.12)."""
    kept = next((c for c in one.checksums if c.extent.file == str(path) and c.extent.offset <= at < c.extent.end), None)
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
