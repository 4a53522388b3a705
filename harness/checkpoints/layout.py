"""The shapes that all checkpoint formats are read into: where each tensor's bytes lie, and what was found wrong.

A layout holds no bytes of tensors, only where they are. Offsets and lengths are bytes; steps are as the checkpoint
itself or its name tells them.
"""

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
    """Kinds of what can be wrong with a checkpoint."""

    TORN = "torn"  # bytes or files are missing: cut off, or never written to the end
    UNREADABLE = "unreadable"  # it is all there, and its structure can't be followed
    OVERLAP = "overlap"  # parts of a sharded tensor overlap or leave a gap
    HOSTILE = "hostile"  # loading it with plain pickle would run a program or code
    CRC = "crc"  # it loads, and its bytes are not those that were written: a CRC in the file differs
    DIGEST = "digest"  # likewise, by a digest that was taken at save time
    RACED = "raced"  # likewise, and it was so as soon as the file was written: memory changed during the save
    STALE = "stale"  # a part of another save than the rest
    NAN = "nan"  # a tensor holds NaN
    LIMIT = "limit"  # nothing that is known to be wrong: it can't be looked at
    UNFINISHED = "unfinished"  # its own name says that it is not a finished checkpoint


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `text` names where; the rest is for programs."""

    kind: Trouble
    text: str
    file: str | None = None
    tensor: str | None = None
    element: tuple[int, ...] | None = None  # index in the whole tensor
    bits: tuple[int, ...] | None = None  # of that element's bits, counted from the least significant one
    offset: int | None = None  # in the file

    @property
    def loads(self) -> bool:
        """Whether the format's own loader would still take it."""
        loads = (Trouble.CRC, Trouble.DIGEST, Trouble.RACED, Trouble.STALE, Trouble.NAN, Trouble.UNFINISHED)
        return self.kind in loads


class Unreadable(Exception):
    """Raised while reading. `kind` is what kind of problem it is."""

    def __init__(self, text: str, kind: Trouble = Trouble.UNREADABLE) -> None:
        super().__init__(text)
        self.kind = kind


def torn(text: str) -> Unreadable:
    return Unreadable(text, Trouble.TORN)


@dataclass(frozen=True)
class Extent:
    """A run of bytes in one file."""

    file: str  # full path or URL
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Shard:
    """A box of a tensor and where its bytes are, in row-major order unless there are strides (in elements)."""

    offsets: tuple[int, ...]  # of the box in the whole tensor
    sizes: tuple[int, ...]
    extent: Extent
    strides: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. `name`: nested keys joined by dots, after "FILE:" where the checkpoint is a folder of files."""

    name: str
    dtype: str  # as torch writes it, without "torch."
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]  # in row-major order of their offsets
    inline: bytes | None = None  # its bytes, where they are part of a pickle (numpy arrays)

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
    """A CRC-32 that the format itself keeps of some bytes."""

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
    """One checkpoint as its files tell of it. `problems` is what reading the structure alone found."""

    path: str  # full path or URL
    format: str  # dcp, torch, safetensors, huggingface, lightning, accelerate, deepspeed, megatron, dir
    step: int | None = None
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)  # scalars as text; a digest of what is long
    files: list[File] = field(default_factory=list)
    checksums: list[Checksum] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # state that a resume needs and that is not in it
    unread: list[str] = field(default_factory=list)  # types of its files that may hold tensors and are not read
    opaque: list[str] = field(default_factory=list)  # entries whose classes only real unpickling would make
    problems: list[Problem] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not any(one.kind in (Trouble.TORN, Trouble.UNFINISHED) for one in self.problems)

    @property
    def loadable(self) -> bool:
        return all(one.loads for one in self.problems)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)
