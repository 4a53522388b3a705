"""The event of a usual step as a packed line. It is written in every step, and is a third as long as JSON.

    #SOURCE RECORD            if SOURCE is rankR-aA-..., the name of the file of rank R in attempt A
    #SOURCE=R,A RECORD        otherwise

The record is little-endian: flags, the phases (a bit for each), the numbers of losses, rates, samples and indices; the
fixed part (_HEAD); a mask of the values that are None (only if there are such values); the microseconds in each phase,
the losses, the learning rates, the digests of the samples (ROW bytes each), the indices (4 or 8 bytes each), and the
CRC-32 of everything before it, including the text, by which a damaged line is detected. With the flag SUMS, the sums of
the samples and of the indices (check_sums.py, 8 bytes each) replace digests and indices.

The only newline of a line is its last byte. To achieve this, the record is divided into parts of 240 bytes. All bytes
of a part are XORed with the same byte, chosen so that none of them is a newline, and the part begins with that byte.

`wire.Event.from_line` reads the line. A step that does not fit into a packed line is written as JSON."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from .check_sums import Sums


MARK = b"#"
ROW = 6  # bytes of the digest of a sample
# A record holds a bit for the index of each phase in this tuple, so only append.
PHASES = (
    "start", "data", "forward", "backward", "collective", "optimizer", "checkpoint_write", "checkpoint_written",
    "checkpoint_load", "new_epoch",
)  # fmt: skip
# flags, phases, losses, rates, samples, indices
SHAPE = struct.Struct("<BHBBHH")
# Flags: the last two bits are `skipped` (2: None).
SKIPPED, NONES, NO_SAMPLES, NO_INDICES, WIDE, SUMS = 3, 4, 8, 16, 32, 64
_HEAD = "IddIii"  # in this order: seq, wall_s, mono_s, step, opt_step, sched_step
NONE = -(1 << 31)  # stands for None in opt_step and sched_step
CRC = 4
PART = 240  # bytes: few enough that some byte can be XORed with all of them and leave no newline
_BITS = 64
_NO_NUMBER = float("nan")
_NAMED = re.compile(r"rank(0|[1-9]\d*)-a(0|[1-9]\d*)-")
_NEWLINE = ord("\n")


class Packer:
    """Makes the packed lines of one event file."""

    def __init__(self, source: str, rank: int, attempt: int) -> None:
        named = _NAMED.match(source)
        is_named = named is not None and (int(named[1]), int(named[2])) == (rank, attempt)
        self._prefix = MARK + f"{source}{'' if is_named else f'={rank},{attempt}'} ".encode()
        self._fits = source.isprintable() and not set(source) & {" ", "="}
        self._crc = crc32(self._prefix)
        self._shapes: dict[tuple[Any, ...], tuple[Any, Sequence[str], int, bytes]] = {}  # see `_learn`
        self._wide = 0  # WIDE after an index did not fit into 4 bytes

    def line(
        self, seq: int, wall_s: float, mono_s: float, step: int, losses: Sequence[float | None],
        lr: Sequence[float | None], opt_step: int | None, sched_step: int | None, skipped: bool | None,
        samples: bytes | None, indices: Sequence[int] | None, phases: Mapping[Any, float], sums: Sums | None = None,
    ) -> bytes:  # fmt: skip
        """The packed line. If `sums` are given, they replace samples and indices. Raises struct.error, ValueError or
        OverflowError if the values do not fit into a packed line."""
        nones: tuple[int, ...] = ()
        given = losses, lr
        if None in losses or None in lr:
            number, (losses, lr) = _without_none(losses, lr)
            nones = (number,)
        if opt_step == NONE or sched_step == NONE or not self._fits:
            raise ValueError("no place for it")
        shape = (
            self._wide, len(losses), len(lr), -1 if samples is None else len(samples),
            -1 if indices is None else len(indices), len(nones), sums and (sums.in_samples, sums.in_indices), *phases,
        )  # fmt: skip
        behind = (samples or b"", *(indices or ())) if sums is None else (sums.samples, sums.indices)
        pack, names, flags, rest = self._shapes.get(shape) or self._learn(shape)
        # This runs in every step, so it makes few calls.
        in_phases = []
        for name in names:
            in_phases.append(int(phases[name] * 1e6 + 0.5))
        try:
            record: bytes = pack(
                flags | (2 if skipped is None else skipped), rest, seq, wall_s, mono_s, step,
                NONE if opt_step is None else opt_step, NONE if sched_step is None else sched_step, *nones, *in_phases,
                *losses, *lr, *behind,
            )  # fmt: skip
        except struct.error:
            if self._wide or not indices or 0 <= min(indices) <= max(indices) < 1 << 32:
                raise
            self._wide = WIDE
            return self.line(seq, wall_s, mono_s, step, *given, opt_step, sched_step, skipped, samples, indices, phases)
        record += crc32(record, self._crc).to_bytes(CRC, "little")
        if len(record) <= PART and b"\n" not in record:
            return self._prefix + b"\0" + record + b"\n"
        return self._prefix + _without_newlines(record) + b"\n"

    def _learn(self, shape: tuple[Any, ...]) -> tuple[Any, Sequence[str], int, bytes]:
        """The way to pack records of this shape: the packing function, the phases in order, the flags, and the rest of
        the shape as bytes."""
        wide, losses, lr, samples, indices, nones, sums, *phases = shape
        rows = samples if samples < 0 else samples // ROW
        if sums is not None:
            wide, (rows, indices) = SUMS, sums
        flags = wide | (NONES if nones else 0) | (NO_SAMPLES if rows < 0 else 0) | (NO_INDICES if indices < 0 else 0)
        places = sorted(map(PHASES.index, phases))
        as_bytes = SHAPE.pack(flags, sum(1 << at for at in places), losses, lr, max(rows, 0), max(indices, 0))
        layout = f"<B{SHAPE.size - 1}s{_layout(flags, len(places), losses, lr, rows, indices)}"
        if len(self._shapes) >= _BITS:  # the batches of this job have many different sizes
            self._shapes.clear()
        learned = struct.Struct(layout).pack, [PHASES[at] for at in places], flags, as_bytes[1:]
        self._shapes[shape] = learned
        return learned


def _layout(flags: int, phases: int, losses: int, lr: int, rows: int, indices: int) -> str:
    nones = "Q" if flags & NONES else ""
    index = "q" if flags & WIDE else "I"
    samples = "QQ" if flags & SUMS else f"{ROW * max(rows, 0)}s{max(indices, 0)}{index}"
    return f"{_HEAD}{nones}{phases}I{losses + lr}d{samples}"


def _without_none(losses: Sequence[float | None], lr: Sequence[float | None]) -> tuple[int, list[list[float]]]:
    both = [*losses, *lr]
    if len(both) > _BITS:
        raise ValueError("too many numbers")
    plain = [_NO_NUMBER if value is None else value for value in both]
    nones = sum(1 << place for place, value in enumerate(both) if value is None)
    return nones, [plain[: len(losses)], plain[len(losses) :]]


_XORED = [bytes(byte ^ key for byte in range(256)) for key in range(256)]


def _without_newlines(record: bytes) -> bytes:
    parts = []
    for at in range(0, len(record), PART):
        part, key = record[at : at + PART], 0
        if _NEWLINE in part:
            key = next(key for key in range(1, 256) if key != _NEWLINE and key ^ _NEWLINE not in part)
            part = part.translate(_XORED[key])
        parts += [bytes((key,)), part]
    return b"".join(parts)


def _with_newlines(text: bytes) -> bytes:
    parts = (text[at : at + PART + 1] for at in range(0, len(text), PART + 1))
    return b"".join(part[1:].translate(_XORED[part[0]]) for part in parts)


def is_packed(line: bytes | str) -> bool:
    return line[:1] == MARK


def unpack(line: bytes) -> dict[str, Any]:
    """The fields of the event in a packed line. Raises ValueError if the line is torn or damaged."""
    prefix, space, text = line.removesuffix(b"\n").partition(b" ")
    record = _with_newlines(text)
    if crc32(record[:-CRC], crc32(prefix + space)).to_bytes(CRC, "little") != record[-CRC:]:
        raise ValueError("torn or damaged: its check sum is another one")
    try:
        source, rank, attempt = who(prefix)
        return {"source": source, "rank": rank, "attempt": attempt, **_fields(record)}
    except (struct.error, IndexError) as error:
        raise ValueError(f"not a packed event: {error}") from error


def who(prefix: bytes) -> tuple[str, int, int]:
    """Source, rank and attempt of a packed line. `prefix`: the line up to its first space. Raises ValueError if there
    is no such prefix."""
    source, equals, numbers = prefix.removeprefix(MARK).decode().partition("=")
    if equals:
        rank, attempt = numbers.split(",")
    elif named := _NAMED.match(source):
        rank, attempt = named.groups()
    else:
        raise ValueError("torn or damaged: no rank and attempt")
    return source, int(rank), int(attempt)


def _fields(record: bytes) -> dict[str, Any]:
    flags, which, losses, lr, rows, in_indices = SHAPE.unpack_from(record)
    names = [name for at, name in enumerate(PHASES) if which >> at & 1]
    layout = struct.Struct("<" + _layout(flags, len(names), losses, lr, rows, in_indices))
    if layout.size != len(record) - SHAPE.size - CRC or which >> len(PHASES):
        raise ValueError("not a packed event: its length is another one")
    seq, wall_s, mono_s, step, opt_step, sched_step, *numbers = layout.unpack_from(record, SHAPE.size)
    nones = numbers.pop(0) if flags & NONES else 0
    in_phases, numbers = numbers[: len(names)], numbers[len(names) :]
    end, sums = losses + lr, None
    if flags & SUMS:
        flags, sums = flags | NO_SAMPLES | NO_INDICES, (rows, numbers[end], in_indices, numbers[end + 1])
    rates = [None if nones >> place & 1 else value for place, value in enumerate(numbers[:end])]
    data = payload(
        rates[:losses], rates[losses:], None if opt_step == NONE else opt_step,
        None if sched_step == NONE else sched_step, (False, True, None, None)[flags & SKIPPED],
        None if flags & NO_SAMPLES else numbers[end], None if flags & NO_INDICES else numbers[end + 1 :],
        {name: each / 1e6 for name, each in zip(names, in_phases, strict=True)}, sums,
    )  # fmt: skip
    return {"seq": seq, "wall_s": wall_s, "mono_s": mono_s, "step": step, "data": data}


def payload(
    losses: Sequence[float | None], lr: Sequence[float | None], opt_step: int | None, sched_step: int | None,
    skipped: bool | None, samples: bytes | None, indices: Sequence[int] | None, phases: Mapping[Any, float],
    sums: Sequence[int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The payload of a step's event, from the fields of a packed line."""
    found = {
        "losses": list(losses), "samples": None if samples is None else in_hex(samples),
        "indices": None if indices is None else list(indices), "lr": list(lr), "opt_step": opt_step,
        "sched_step": sched_step, "phases": {name: round(seconds, 6) for name, seconds in phases.items()},
        "skipped": skipped,
    }  # fmt: skip
    return found if sums is None else {**found, "sums": list(sums)}


def in_hex(samples: bytes) -> list[str]:
    """The digest of each sample, in hexadecimal."""
    text = samples.hex()
    return [text[place : place + 2 * ROW] for place in range(0, len(text), 2 * ROW)]
