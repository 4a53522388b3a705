"""The event of a usual step as a packed line: it is written in every step, and packing is faster than JSON.

    !SOURCE RANK ATTEMPT BASE64

The base64 part is little-endian: the fixed part (_HEAD), the numbers of values that follow and the codes of the phases
(the shape), the seconds of each phase, the losses, the learning rates, the digests of the samples (ROW bytes each), the
indices (8 bytes each), and the CRC-32 of everything before it, including the text. So a damaged line is detected.
`wire.Event.from_line` reads it; a step that does not fit is written as JSON."""

from __future__ import annotations

import struct
from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

MARK, _MARK_AS_TEXT = b"!", "!"
ROW = 6  # bytes of the digest of a sample
# A record holds the index of a phase in this tuple, so only append.
PHASES = (
    "start", "data", "forward", "backward", "collective", "optimizer", "checkpoint_write", "checkpoint_written",
    "checkpoint_load",
)  # fmt: skip
# seq, wall_s, mono_s, step, opt_step, sched_step, skipped, and a bit for each loss and each rate that is None
_HEAD = "<qddqqqbQ"
SHAPE = struct.Struct("<BBBii")  # phases, losses, rates, samples, indices; -1: None
_HEAD_SIZE = struct.calcsize(_HEAD)
NONE = -(1 << 63)
_BITS = 64
CRC = 4
_NO_NUMBER = float("nan")


class Packer:
    """Makes the packed lines of one event file."""

    def __init__(self, source: str, rank: int, attempt: int) -> None:
        self._prefix = MARK + f"{source} {rank} {attempt} ".encode()
        self._crc = crc32(self._prefix)
        self._shapes: dict[tuple[Any, ...], tuple[Any, bytes]] = {}  # how to pack a record; its shape as bytes

    def line(
        self, seq: int, wall_s: float, mono_s: float, step: int, losses: Sequence[float | None],
        lr: Sequence[float | None], opt_step: int | None, sched_step: int | None, skipped: bool | None,
        samples: bytes | None, indices: Sequence[int] | None, phases: Mapping[Any, float],
    ) -> bytes:  # fmt: skip
        """The packed line. Raises struct.error or ValueError if the values do not fit into a packed line."""
        shape = (
            len(losses), len(lr), -1 if samples is None else len(samples), -1 if indices is None else len(indices),
            *phases,
        )  # fmt: skip
        pack, as_bytes = self._shapes.get(shape) or self._learn(shape)
        nones = 0
        if None in losses or None in lr:
            nones, (losses, lr) = _without_none(losses, lr)
        record = pack(
            seq, wall_s, mono_s, step, NONE if opt_step is None else opt_step,
            NONE if sched_step is None else sched_step, -1 if skipped is None else skipped, nones, as_bytes,
            *phases.values(), *losses, *lr, samples or b"", *(indices or ()),
        )  # fmt: skip
        return self._prefix + b2a_base64(record + crc32(record, self._crc).to_bytes(CRC, "little"))

    def _learn(self, shape: tuple[Any, ...]) -> tuple[Any, bytes]:
        losses, lr, samples, indices, *phases = shape
        rows = samples if samples < 0 else samples // ROW
        codes = bytes(map(PHASES.index, phases))
        as_bytes = SHAPE.pack(len(phases), losses, lr, rows, indices) + codes
        pack = struct.Struct(f"{_HEAD}{len(as_bytes)}s{_rest(len(codes), losses, lr, rows, indices)}").pack
        if len(self._shapes) >= _BITS:  # the batches of this job have all kinds of sizes
            self._shapes.clear()
        self._shapes[shape] = pack, as_bytes
        return pack, as_bytes


def _rest(phases: int, losses: int, lr: int, rows: int, indices: int) -> str:
    return f"{phases + losses + lr}d{ROW * max(rows, 0)}s{max(indices, 0)}q"


def _without_none(losses: Sequence[float | None], lr: Sequence[float | None]) -> tuple[int, list[list[float]]]:
    both = [*losses, *lr]
    if len(both) > _BITS:
        raise ValueError("too many numbers")
    plain = [_NO_NUMBER if value is None else value for value in both]
    nones = sum(1 << place for place, value in enumerate(both) if value is None)
    return nones, [plain[: len(losses)], plain[len(losses) :]]


def is_packed(line: bytes | str) -> bool:
    return line[:1] in (MARK, _MARK_AS_TEXT)


def unpack(line: bytes) -> dict[str, Any]:
    """The fields of the event in a packed line. Raises ValueError if the line is torn or damaged."""
    text, _, coded = line.rpartition(b" ")
    whole = a2b_base64(coded)
    record, crc = whole[:-CRC], whole[-CRC:]
    if crc32(record, crc32(text + b" ")).to_bytes(CRC, "little") != crc:
        raise ValueError("torn or damaged: its check sum is another one")
    try:
        source, rank, attempt = text.removeprefix(MARK).decode().split(" ")
        return {"source": source, "rank": int(rank), "attempt": int(attempt), **_fields(record)}
    except (struct.error, IndexError) as error:
        raise ValueError(f"not a packed event: {error}") from error


def _fields(record: bytes) -> dict[str, Any]:
    seq, wall_s, mono_s, step, opt_step, sched_step, skipped, nones = struct.unpack_from(_HEAD, record)
    in_phases, losses, lr, rows, in_indices = SHAPE.unpack_from(record, _HEAD_SIZE)
    at = _HEAD_SIZE + SHAPE.size
    names = [PHASES[code] for code in record[at : at + in_phases]]
    numbers = struct.unpack("<" + _rest(in_phases, losses, lr, rows, in_indices), record[at + in_phases :])
    end = in_phases + losses + lr
    rates = [None if nones >> place & 1 else value for place, value in enumerate(numbers[in_phases:end])]
    data = payload(
        rates[:losses], rates[losses:], None if opt_step == NONE else opt_step,
        None if sched_step == NONE else sched_step, None if skipped < 0 else bool(skipped),
        None if rows < 0 else numbers[end], None if in_indices < 0 else numbers[end + 1 :],
        dict(zip(names, numbers, strict=False)),
    )  # fmt: skip
    return {"seq": seq, "wall_s": wall_s, "mono_s": mono_s, "step": step, "data": data}


def payload(
    losses: Sequence[float | None], lr: Sequence[float | None], opt_step: int | None, sched_step: int | None,
    skipped: bool | None, samples: bytes | None, indices: Sequence[int] | None, phases: Mapping[Any, float],
) -> dict[str, Any]:  # fmt: skip
    """The payload of a step's event, from the fields of a packed line."""
    return {
        "losses": list(losses), "samples": None if samples is None else in_hex(samples),
        "indices": None if indices is None else list(indices), "lr": list(lr), "opt_step": opt_step,
        "sched_step": sched_step, "phases": {name: round(seconds, 6) for name, seconds in phases.items()},
        "skipped": skipped,
    }  # fmt: skip


def in_hex(samples: bytes) -> list[str]:
    """The digest of each sample, as hexadecimal text."""
    text = samples.hex()
    return [text[place : place + 2 * ROW] for place in range(0, len(text), 2 * ROW)]
