"""Packed lines (agent/packed.py) of one process as columns: all lines of one length at once, without an object for
each."""

from __future__ import annotations

from binascii import Error, a2b_base64
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from torchaos.harness.agent import packed
from torchaos.harness.agent.wire import Event, Kind

Array = npt.NDArray[Any]

_LONGEST_S = 2**31 / 1e6  # of a phase: in microseconds it fits into 32 bits
_TIME_END = 2.0**62  # as in events/payloads.py
_BITS = 64


@dataclass(frozen=True)
class Block:
    """Steps of one process with as many losses, samples and so on in each, in order of their lines."""

    source: str
    rank: int
    attempt: int
    phases: tuple[str, ...]
    # By name, as in packed._HEAD; a row for each step. Without "nones", all losses were seen.
    own: dict[str, Array] = field(repr=False)

    def __len__(self) -> int:
        return len(self.own["seq"])

    def shifted(self, seconds: Array) -> Block:
        """The same with other times. `seconds`: to add to each."""
        return replace(self, own={**self.own, "mono_s": self.own["mono_s"] + seconds})

    def event(self, row: int) -> Event:
        own = self.own
        return Event(
            Kind.STEP, self.source, int(own["seq"][row]), float(own["wall_s"][row]), float(own["mono_s"][row]),
            self.rank, self.attempt, int(own["step"][row]), self.payload(row),
        )  # fmt: skip

    def payload(self, row: int) -> dict[str, Any]:
        own = self.own
        opt_step, sched_step, skipped = (int(own[name][row]) for name in ("opt_step", "sched_step", "skipped"))
        losses = own["losses"][row].tolist()
        if "nones" in own:
            nones = int(own["nones"][row])
            losses = [None if nones >> place & 1 else value for place, value in enumerate(losses)]
        return packed.payload(
            losses, own["lr"][row].tolist(), None if opt_step == packed.NONE else opt_step,
            None if sched_step == packed.NONE else sched_step, None if skipped < 0 else bool(skipped),
            own["samples"][row].tobytes() if "samples" in own else None,
            own["indices"][row].tolist() if "indices" in own else None,
            dict(zip(self.phases, (own["took_us"][row] / 1e6).tolist(), strict=True)),
        )  # fmt: skip


def blocks_of(lines: Sequence[bytes]) -> tuple[list[Block], list[int]]:
    """The packed lines as blocks, and the places of all lines that are not in a block: other events, torn and damaged
    lines, and steps that do not fit."""
    places: dict[int, list[int]] = defaultdict(list)
    others: list[int] = []
    for place, line in enumerate(lines):
        (places[len(line)] if line[:1] == packed.MARK else others).append(place)
    blocks: list[Block] = []
    for alike in places.values():
        left = _Lines([lines[place] for place in alike])
        blocks += left.blocks()
        others += [alike[row] for row in np.flatnonzero(left.left).tolist()]
    return blocks, sorted(others)


class _Lines:
    """Packed lines of one length. `left`: those that are in no block yet."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._first = lines[0]
        self.left = np.ones(len(lines), bool)
        self._text = np.frombuffer(b"".join(lines), np.uint8).reshape(len(lines), len(self._first))

    def blocks(self) -> Iterator[Block]:
        prefix, _, coded = self._first.rpartition(b" ")
        prefix += b" "
        try:
            source, rank, attempt = prefix.removeprefix(packed.MARK).decode().rstrip(" ").split(" ")
            who = source, int(rank), int(attempt)
        except ValueError:
            return
        if (
            not coded.endswith(b"\n")
            or len(coded) < _SHORTEST
            or (len(coded) - 1) % 4
            or not 0 <= min(who[1:]) <= max(who[1:]) < 2**63
        ):
            return
        records = self._records(prefix, len(coded) - 1 - coded.count(b"="))
        if records is None:
            return
        while len(rows := np.flatnonzero(self.left & self._whole)):
            first = records[rows[0]]
            in_phases, losses, lr, samples, indices = packed.SHAPE.unpack(first[_HEAD.itemsize :][: packed.SHAPE.size])
            head = _HEAD.itemsize + packed.SHAPE.size + in_phases
            wire = _wire(in_phases, losses, lr, samples, indices)
            self._whole[rows[0]] = False  # so that the loop ends
            if wire.itemsize != records.shape[1]:
                continue
            same = rows[(records[rows, _HEAD.itemsize : head] == first[_HEAD.itemsize : head]).all(1)]
            found = records[same].view(wire)[:, 0]
            fits = _fits(found, losses)
            codes = first[head - in_phases : head].tolist()
            if max(codes, default=0) >= len(packed.PHASES) or len(set(codes)) < len(codes):
                fits[:] = False
            self._whole[same] = False
            self.left[same[fits]] = False
            if fits.any():
                found = found if fits.all() else found[fits]
                yield Block(*who, tuple(packed.PHASES[code] for code in codes), _columns(found, samples, indices))

    def _records(self, prefix: bytes, coded: int) -> Array | None:
        """The decoded records, a row for each line. Sets `_whole`: those whose check sum is right."""
        text = self._text[:, len(prefix) : -1].copy()
        whole = (text[:, coded:] == ord("=")).all(1)  # two places at most; elsewhere, the length will be another one
        text[:, coded:] = ord("A")
        try:
            decoded = a2b_base64(text.tobytes())
        except Error:
            return None
        stride, size = text.shape[1] // 4 * 3, coded * 3 // 4
        if len(decoded) != len(text) * stride:
            return None
        seed, body, view = crc32(prefix), size - packed.CRC, memoryview(decoded)
        sums = np.array([crc32(view[at : at + body], seed) for at in range(0, len(decoded), stride)], "<u4")
        records = np.frombuffer(decoded, np.uint8).reshape(len(text), stride)[:, :size]
        stored = np.ascontiguousarray(records[:, body:]).view("<u4")[:, 0]
        usual = (self._text[:, : len(prefix)] == self._text[0, : len(prefix)]).all(1) & (self._text[:, -1] == ord("\n"))
        self._whole = usual & whole & (stored == sums)
        return records


_HEAD = np.dtype([
    ("seq", "<i8"), ("wall_s", "<f8"), ("mono_s", "<f8"), ("step", "<i8"), ("opt_step", "<i8"), ("sched_step", "<i8"),
    ("skipped", "i1"), ("nones", "<u8"),
])  # fmt: skip


_SHORTEST = (_HEAD.itemsize + packed.SHAPE.size + packed.CRC) * 4 // 3  # digits of a record


def _wire(phases: int, losses: int, lr: int, samples: int, indices: int) -> np.dtype[Any]:
    """The fields of a record; see packed.py."""
    return np.dtype([
        *_HEAD.descr, ("shape", f"V{packed.SHAPE.size + phases}"), ("phases", "<f8", (phases,)),
        ("losses", "<f8", (losses,)), ("lr", "<f8", (lr,)), ("samples", "u1", (max(samples, 0) * packed.ROW,)),
        ("indices", "<i8", (max(indices, 0),)), ("crc", "<u4"),
    ])  # fmt: skip


def _fits(found: Array, losses: int) -> Array:
    """Which steps have only values that events/payloads.py accepts, all rates, and phases that are kept in
    microseconds."""
    right = (found["seq"] >= 0) & (found["step"] >= 0)
    if losses < _BITS:
        right &= found["nones"] >> np.uint64(losses) == 0
    for name in ("wall_s", "mono_s"):
        right &= (found[name] >= 0) & (found[name] < _TIME_END)
    return right & ((found["phases"] >= 0) & (found["phases"] < _LONGEST_S)).all(1)


def _columns(found: Array, samples: int, indices: int) -> dict[str, Array]:
    names = [*(_HEAD.names or ()), "losses", "lr"]
    names += ["samples"] if samples >= 0 else []
    if not found["nones"].any():
        names.remove("nones")
    own = {name: np.ascontiguousarray(found[name]) for name in names}
    own["took_us"] = _in_us(found["phases"])
    if indices >= 0:
        wide = found["indices"]
        small = not wide.size or -(2**31) <= wide.min() <= wide.max() < 2**31
        own["indices"] = wide.astype(np.int32 if small else np.int64)
    return own


def _in_us(seconds: Array) -> Array:
    """As packed.py rounds them: it takes the nearest decimal number, and the product alone may miss it."""
    exact = seconds * 1e6
    rounded = np.rint(exact)
    for at in np.argwhere(np.abs(np.abs(exact - rounded) - 0.5) < 1e-6):
        rounded[tuple(at)] = round(round(float(seconds[tuple(at)]), 6) * 1e6)
    return rounded.astype(np.int32)


def in_order(blocks: Iterable[Block]) -> Iterator[tuple[Block, int]]:
    """All rows of blocks in order of time, as events are merged: by time, source, and number."""
    blocks = list(blocks)
    if not blocks:
        return
    code = {source: place for place, source in enumerate(sorted({block.source for block in blocks}))}
    of = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    row = np.concatenate([np.arange(len(block)) for block in blocks])
    seq, mono_s = (np.concatenate([block.own[name] for block in blocks]) for name in ("seq", "mono_s"))
    sources = np.array([code[block.source] for block in blocks])[of]
    for place in np.lexsort((seq, sources, mono_s)):
        yield blocks[of[place]], int(row[place])
