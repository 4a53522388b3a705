"""Packed lines (protocol/packed_lines.py) of one process as columns: all lines of one length are read at once, without
an object for each line. Values that every judgement compares are kept in columns. The other values are read again from
their line when they are needed."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload
from zlib import crc32

import numpy as np
import numpy.typing as npt

from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol import packed_lines
from torchaos.harness.protocol.wire import Event, Kind, Phase
from torchaos.harness.record.steps import execution

Array = npt.NDArray[Any]

_COUNTED = ("seq", "opt_step", "sched_step")  # in a block: less "step"
_KINDS = (np.int8, np.int16, np.int32, np.int64)
_TIME_END = 2.0**62  # as in events/journal.py
_BITS = 64


@dataclass(frozen=True)
class Block:
    """Steps of one process, in order of their lines. All have the same number of losses, samples and other values."""

    source: str
    rank: int
    attempt: int
    phases: tuple[str, ...]
    in_samples: int  # samples of each step; -1: not seen
    in_indices: int
    summed: bool  # only the sums of the samples are known, see protocol/check_sums.py
    layout: np.dtype[Any] = field(repr=False)  # of a record, see _layout
    # A row for each step. As in _HEAD of packed_lines.py: "mono_s", "step", "nones" (without it, all losses were seen);
    # "losses", "lr"; numbers for the samples: "samples", "samples_sum" (see execution.py), and "indices_sum" if only
    # sums are known; seconds in all phases and in saving: "took_s", "saving_s". A missing value is 0. The columns
    # "seq", "opt_step" and "sched_step", which usually count steps, hold the distance from "step"; see `whole`.
    own: dict[str, Array] = field(repr=False)
    lines: Sequence[bytes] = field(repr=False)

    def __len__(self) -> int:
        return len(self.own["step"])

    def whole(self, name: str) -> Array:
        """The values of a column that is stored as the difference from "step"."""
        found: Array = self.own["step"] + self.own[name].astype(np.int64)
        return found

    def shifted(self, seconds: Array) -> Block:
        """The same block with `seconds` added to all times."""
        return replace(self, own={**self.own, "mono_s": self.own["mono_s"] + seconds})

    def is_like(self, other: Block) -> bool:
        """Whether the two blocks can be joined: they are from the same process, and have the same columns."""
        mine, others = ({name: values.shape[1:] for name, values in block.own.items()} for block in (self, other))
        return mine == others and replace(self, own={}, lines=()) == replace(other, own={}, lines=())

    def joined(self, other: Block) -> Block:
        own = {name: _joined(name, values, other.own[name]) for name, values in self.own.items()}
        if isinstance(self.lines, Stored) and isinstance(other.lines, Stored):
            return replace(self, own=own, lines=self.lines.joined(other.lines))
        return replace(self, own=own, lines=[*self.lines, *other.lines])

    def event(self, row: int) -> Event:
        fields = packed_lines.unpack(self.lines[row])
        return Event(Kind.STEP, **{**fields, "mono_s": float(self.own["mono_s"][row])})

    @property
    def first(self) -> Event:
        """The event of the step that ended first, without payload and time of day. Its line is not read."""
        row = int(self.own["mono_s"].argmin())
        step, mono_s = (self.own[name][row].item() for name in ("step", "mono_s"))
        seq = step + int(self.own["seq"][row])
        return Event(Kind.STEP, self.source, seq, 0.0, mono_s, self.rank, self.attempt, step)

    def payload(self, row: int) -> dict[str, Any]:
        """The payload of the event in line `row`, with training losses that were reported later."""
        found: dict[str, Any] = packed_lines.unpack(self.lines[row])["data"]
        if "nones" in self.own:
            losses, nones = self.own["losses"][row].tolist(), int(self.own["nones"][row])
            found["losses"] = [None if nones >> place & 1 else value for place, value in enumerate(losses)]
        return found

    def again(self) -> Array:
        """All fields of the lines, read again; see _layout."""
        lines = list(self.lines)
        text = np.frombuffer(b"".join(lines), np.uint8).reshape(len(lines), len(lines[0]))
        found: Array = _records(text, lines[0].index(b" ") + 1).view(self.layout)[:, 0]
        return found


class Stored(Sequence[bytes]):
    """Lines of equal length in a file that only grows. Each access raises ChaosError if the file was removed or cut."""

    _TOGETHER = 1 << 16  # bytes that are read at once

    def __init__(self, path: Path, starts: Array, size: int) -> None:
        self._path, self._size = path, size
        self._skipped = narrow(starts - size * np.arange(len(starts)))  # bytes of other lines before each line

    def __len__(self) -> int:
        return len(self._skipped)

    @property
    def _starts(self) -> Array:
        found: Array = self._skipped + self._size * np.arange(len(self))
        return found

    def joined(self, other: Stored) -> Stored:
        """These lines and those of another part of the same file."""
        return Stored(self._path, np.concatenate([self._starts, other._starts]), self._size)

    @overload
    def __getitem__(self, row: int) -> bytes: ...
    @overload
    def __getitem__(self, row: slice) -> list[bytes]: ...
    def __getitem__(self, row: int | slice) -> bytes | list[bytes]:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        return next(self._read([self._size * row + int(self._skipped[row])], self._size))

    def __iter__(self) -> Iterator[bytes]:
        return self._read(self._starts.tolist(), max(self._TOGETHER, self._size))

    def _read(self, starts: Iterable[int], together: int) -> Iterator[bytes]:
        try:
            with open(self._path, "rb", buffering=0) as file:
                at, text = 0, b""
                for start in starts:
                    if not at <= start <= at + len(text) - self._size:
                        at, text = start, os.pread(file.fileno(), together, start)
                    line = text[start - at : start - at + self._size]
                    if len(line) < self._size or line[:1] != packed_lines.MARK or line[-1:] != b"\n":
                        raise ChaosError(f"{self._path}: it was cut off or changed after it was read")
                    yield line
        except OSError as error:
            raise ChaosError(f"{self._path}: it can't be read again: {error.strerror}") from error


def blocks_of(
    lines: Sequence[bytes], path: Path | None = None, starts: Sequence[int] | None = None
) -> tuple[list[Block], list[int]]:
    """The packed lines as blocks, and the places of all other lines: other events, torn and damaged lines, and steps
    that fit into no block. `path`: the file with these lines; if it is given, the blocks keep no line in memory.
    `starts`: where the lines start in that file; None: they are the whole file."""
    places: dict[int, list[int]] = defaultdict(list)
    others: list[int] = []
    for place, line in enumerate(lines):
        (places[len(line)] if line[:1] == packed_lines.MARK else others).append(place)
    at = np.cumsum([0, *map(len, lines)]) if starts is None else np.array(starts)
    blocks: list[Block] = []
    for size, alike in places.items():
        own = [lines[place] for place in alike]
        left = _Lines(own)
        for block, rows in left.blocks():
            kept = Stored(path, at[np.array(alike)[rows]], size) if path else [own[row] for row in rows.tolist()]
            blocks.append(replace(block, lines=kept))
        others += [alike[row] for row in np.flatnonzero(left.left).tolist()]
    return blocks, sorted(others)


class _Lines:
    """Packed lines of one length. `left`: the lines that are in no block yet."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._first = lines[0]
        self.left = np.ones(len(lines), bool)
        self._text = np.frombuffer(b"".join(lines), np.uint8).reshape(len(lines), len(self._first))

    def blocks(self) -> Iterator[tuple[Block, Array]]:
        """Yields blocks without their lines, and the places of their lines."""
        text, space, coded = self._first.partition(b" ")
        try:
            source, rank, attempt = packed_lines.who(text)
        except ValueError:
            return
        if len(coded) < _SHORTEST or not 0 <= min(rank, attempt) <= max(rank, attempt) < 2**63:
            return
        prefix = text + space
        records = _records(self._text, len(prefix))
        whole = self._whole(prefix, records)
        while len(rows := np.flatnonzero(self.left & whole)):
            first = records[rows[0], : packed_lines.SHAPE.size]
            flags, which, losses, lr, in_samples, in_indices = packed_lines.SHAPE.unpack(first.tobytes())
            layout = _layout(flags, which, losses, lr, in_samples, in_indices)
            whole[rows[0]] = False  # so that the loop ends
            if layout.itemsize != records.shape[1] or which >> len(packed_lines.PHASES):
                continue
            shapes = records[rows, : packed_lines.SHAPE.size] | _ANY_SKIPPED
            same = rows[(shapes == first | _ANY_SKIPPED).all(1)]
            whole[same] = False
            found = records[same].view(layout)[:, 0]
            fits = _fits(found, losses)
            self.left[same[fits]] = False
            if fits.any():
                phases = tuple(name for at, name in enumerate(packed_lines.PHASES) if which >> at & 1)
                in_samples = -1 if flags & packed_lines.NO_SAMPLES else in_samples
                in_indices = -1 if flags & packed_lines.NO_INDICES else in_indices
                own, summed = _columns(found[fits], phases), bool(flags & packed_lines.SUMS)
                block = Block(source, rank, attempt, phases, in_samples, in_indices, summed, layout, own, ())
                yield block, same[fits]

    def _whole(self, prefix: bytes, records: Array) -> Array:
        """For each line, whether it has this prefix, and its check sum is right."""
        usual: Array = (self._text[:, : len(prefix)] == self._text[0, : len(prefix)]).all(1)
        usual &= self._text[:, -1] == ord("\n")
        seed, size, view = crc32(prefix), records.shape[1], memoryview(records.tobytes())
        ends = range(size - packed_lines.CRC, len(view), size)
        sums = np.array([crc32(view[end - size + packed_lines.CRC : end], seed) for end in ends], "<u4")
        stored = np.ascontiguousarray(records[:, -packed_lines.CRC :]).view("<u4")[:, 0]
        return np.asarray(usual & (stored == sums))


def _records(text: Array, prefix: int) -> Array:
    """The records in lines of equal length, a row for each line. `prefix`: bytes before the record."""
    coded, step = text[:, prefix:-1], packed_lines.PART + 1
    parts = [coded[:, at + 1 : at + step] ^ coded[:, at : at + 1] for at in range(0, coded.shape[1], step)]
    return np.concatenate(parts, axis=1)


_ANY_SKIPPED = np.array([packed_lines.SKIPPED, *[0] * (packed_lines.SHAPE.size - 1)], np.uint8)


def _layout(flags: int, which: int, losses: int, lr: int, samples: int, indices: int) -> np.dtype[Any]:
    """The fields of a record; see protocol/packed_lines.py. The arguments are its shape."""
    behind = (
        [("samples_sum", "<u8"), ("indices_sum", "<u8")]
        if flags & packed_lines.SUMS
        else [
            ("samples", "u1", (samples * packed_lines.ROW,)),
            ("indices", "<i8" if flags & packed_lines.WIDE else "<u4", (indices,)),
        ]
    )
    return np.dtype(
        [
            ("flags", "u1"),
            ("shape", f"V{packed_lines.SHAPE.size - 1}"),
            ("seq", "<u4"),
            ("wall_s", "<f8"),
            ("mono_s", "<f8"),
            ("step", "<u4"),
            ("opt_step", "<i4"),
            ("sched_step", "<i4"),
            *([("nones", "<u8")] * bool(flags & packed_lines.NONES)),
            ("phases", "<u4", (which.bit_count(),)),
            ("losses", "<f8", (losses,)),
            ("lr", "<f8", (lr,)),
            *behind,
            ("crc", "<u4"),
        ]
    )


_SHORTEST = 2 + _layout(0, 0, 0, 0, 0, 0).itemsize  # bytes of a record, with the byte before it and the newline


def _fits(found: Array, losses: int) -> Array:
    """For each step, whether it fits into a block: all its values are accepted by events/journal.py, and it has all
    rates."""
    right = np.ones(len(found), bool)
    if "nones" in (found.dtype.names or ()) and losses < _BITS:
        right &= found["nones"] >> np.uint64(losses) == 0
    for name in ("wall_s", "mono_s"):
        right &= (found[name] >= 0) & (found[name] < _TIME_END)
    return right


def _columns(found: Array, phases: Sequence[str]) -> dict[str, Array]:
    own: dict[str, Array] = {
        "step": found["step"].astype(np.int32 if found["step"].max(initial=0) < 2**31 else np.int64)
    }
    own |= {name: narrow(found[name].astype(np.int64) - found["step"]) for name in _COUNTED}
    own |= {name: np.ascontiguousarray(found[name]) for name in ("mono_s", "losses", "lr")}
    if "nones" in (found.dtype.names or ()):
        own["nones"] = np.ascontiguousarray(found["nones"])
    if "samples_sum" in (found.dtype.names or ()):
        own |= {name: np.ascontiguousarray(found[name]) for name in ("samples_sum", "indices_sum")}
    elif (digests := execution.of_bytes(found["samples"])).size:
        own["samples"], own["samples_sum"] = execution.in_order(digests), execution.in_any_order(digests)
    own["took_s"] = np.zeros(len(found))
    for phase, took_s in zip(phases, (found["phases"] / 1e6).T, strict=True):
        own["took_s"] = own["took_s"] + took_s  # in order, as `sum` does
        if phase == Phase.CHECKPOINT_WRITE.value:
            own["saving_s"] = np.ascontiguousarray(took_s)
    return own


def narrow(values: Array) -> Array:
    """The integers in as few bytes as they need; a single value for all rows if they are equal."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    kind = next(kind for kind in _KINDS if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    if low == high and values.ndim:
        return np.broadcast_to(kind(low), values.shape)
    return values.astype(kind)


def _joined(name: str, first: Array, second: Array) -> Array:
    both = np.concatenate([first, second])
    return narrow(both) if name in _COUNTED else both


def in_order(blocks: Iterable[Block]) -> Iterator[tuple[Block, int]]:
    """All rows of blocks in order of time, as events are merged: by time, source, and number."""
    blocks = list(blocks)
    if not blocks:
        return
    code = {source: place for place, source in enumerate(sorted({block.source for block in blocks}))}
    of = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    row = np.concatenate([np.arange(len(block)) for block in blocks])
    seq = np.concatenate([block.whole("seq") for block in blocks])
    mono_s = np.concatenate([block.own["mono_s"] for block in blocks])
    sources = np.array([code[block.source] for block in blocks])[of]
    for place in np.lexsort((seq, sources, mono_s)):
        yield blocks[of[place]], int(row[place])
