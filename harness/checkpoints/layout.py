"""The data types into which all checkpoint formats are read: the place of each tensor's bytes, and the problems that
were found.

A layout holds no bytes of tensors. Offsets and lengths are in bytes. A step is the number in the checkpoint or in its
name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

ITEM_SIZES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1, "complex64": 8, "complex128": 16, "complex32": 4,
    "qint8": 1, "quint8": 1, "qint32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip


class Trouble(str, Enum):
    """The kinds of problems of a checkpoint."""

    TORN = "torn"  # bytes or files are missing: cut off, or never written to the end
    UNREADABLE = "unreadable"  # nothing is missing, but its structure can't be read
    OVERLAP = "overlap"  # parts of a sharded tensor overlap or leave a gap
    HOSTILE = "hostile"  # a plain pickle load would run programs or code
    CRC = "crc"  # it loads, but a CRC in the file shows that its bytes have changed since they were written
    DIGEST = "digest"  # a digest that was made during the save shows that its bytes have changed since
    RACED = "raced"  # its bytes differed from the memory right after the file was written: memory changed meanwhile
    STALE = "stale"  # a part is from another save than the rest
    NAN = "nan"  # a tensor holds NaN
    LIMIT = "limit"  # it can't be checked; no defect is known
    UNKNOWN = "unknown"  # it is of a kind that is not read; no defect is known
    UNFINISHED = "unfinished"  # its own name says that it is not a finished checkpoint


@dataclass(frozen=True)
class Problem:
    """One problem. `text` is for people and names the place; the other fields are for programs."""

    kind: Trouble
    text: str
    file: str | None = None
    tensor: str | None = None
    element: tuple[int, ...] | None = None  # index in the whole tensor
    bits: tuple[int, ...] | None = None  # the bits of that element, counted from the least significant bit
    offset: int | None = None  # byte in the file

    @property
    def loads(self) -> bool:
        """Whether the format's own loader would load the checkpoint in spite of this problem, as far as is known."""
        loads = (Trouble.CRC, Trouble.DIGEST, Trouble.RACED, Trouble.STALE, Trouble.NAN, Trouble.UNFINISHED)
        return self.kind in loads or self.is_blind

    @property
    def is_blind(self) -> bool:
        """Whether the problem only says that something was not read. That is no damage, and does not exclude damage
        either."""
        return self.kind in (Trouble.LIMIT, Trouble.UNKNOWN)


class Unreadable(Exception):
    """Raised while a checkpoint is read. `kind`: the kind of the problem."""

    def __init__(self, text: str, kind: Trouble = Trouble.UNREADABLE) -> None:
        super().__init__(text)
        self.kind = kind


def torn(text: str) -> Unreadable:
    return Unreadable(text, Trouble.TORN)


def limit(text: str) -> Unreadable:
    return Unreadable(text, Trouble.LIMIT)


def unknown(text: str) -> Unreadable:
    return Unreadable(text, Trouble.UNKNOWN)


@dataclass(frozen=True)
class Extent:
    """A sequence of bytes in one file."""

    file: str  # full path or URL
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Shard:
    """A box of a tensor, and its bytes. The bytes are in row-major order, unless there are strides (in elements)."""

    offsets: tuple[int, ...]  # index of the box's first element in the whole tensor
    sizes: tuple[int, ...]
    extent: Extent
    strides: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. `name`: nested keys joined by dots, after "FILE:" if the checkpoint is a folder of files."""

    name: str
    dtype: str  # as torch writes it, without "torch."
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]  # in row-major order of their offsets
    inline: bytes | None = None  # its bytes, if they are part of a pickle (numpy arrays)

    @property
    def item_size(self) -> int:
        return ITEM_SIZES.get(self.dtype, 1)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.item_size

    @property
    def extents(self) -> Iterator[Extent]:
        return (shard.extent for shard in self.shards)


@dataclass(frozen=True)
class Checksum:
    """A CRC-32 that the format itself stores for some bytes."""

    extent: Extent
    crc: int
    what: str


@dataclass(frozen=True)
class File:
    path: str  # full path or URL
    size: int
    role: str = ""  # data, metadata, tracker, other


@dataclass
class Checkpoint:
    """One checkpoint, as its files describe it. `problems`: found while its structure was read."""

    path: str  # full path or URL
    format: str  # the name of a Format, such as dcp or torch; unknown
    step: int | None = None
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)  # scalars as text; long ones as a digest
    files: list[File] = field(default_factory=list)
    checksums: list[Checksum] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # state that a resume needs and the checkpoint lacks
    unread: list[str] = field(default_factory=list)  # types of its files that may hold tensors but are not read
    opaque: list[str] = field(default_factory=list)  # entries that only real unpickling could create
    problems: list[Problem] = field(default_factory=list)
    by_content: set[str] = field(default_factory=set)  # files that were read although their names show no format
    left_open: list[str] = field(default_factory=list)  # what its files leave open, such as how many ranks there were
    inner: list[str] = field(default_factory=list)  # its folders that are checkpoints of a known format: "weights/"

    @property
    def complete(self) -> bool:
        return not any(problem.kind in (Trouble.TORN, Trouble.UNFINISHED) for problem in self.problems)

    @property
    def loadable(self) -> bool:
        return all(problem.loads for problem in self.problems)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)
