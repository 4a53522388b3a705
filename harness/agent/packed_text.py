"""Packed lines (packed.py) of earlier journals, which are only read:

    !SOURCE RANK ATTEMPT BASE64

The base64 part is little-endian: the fixed part (_HEAD), the numbers of values that follow and the codes of the phases
(the shape), the seconds of each phase, the losses, the learning rates, the digests of the samples (6 bytes each), the
indices (8 bytes each), and the CRC-32 of everything before it, including the text."""

from __future__ import annotations

import struct
from binascii import a2b_base64
from collections.abc import Sequence
from typing import Any, Callable
from zlib import crc32

MARK = b"!"
_HEAD = "<qddqqqbQ"  # seq, wall_s, mono_s, step, opt_step, sched_step, skipped, a bit for each None
_SHAPE = struct.Struct("<BBBii")  # phases, losses, rates, samples, indices; -1: None
_SIZE = struct.calcsize(_HEAD)
_NONE, _ROW, _CRC = -(1 << 63), 6, 4


def unpack(line: bytes, phases: Sequence[str], payload: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """As packed.unpack."""
    text, _, coded = line.rpartition(b" ")
    whole = a2b_base64(coded)
    record, crc = whole[:-_CRC], whole[-_CRC:]
    if crc32(record, crc32(text + b" ")).to_bytes(_CRC, "little") != crc:
        raise ValueError("torn or damaged: its check sum is another one")
    try:
        source, rank, attempt = text.removeprefix(MARK).decode().split(" ")
        seq, wall_s, mono_s, step, opt_step, sched_step, skipped, nones = struct.unpack_from(_HEAD, record)
        in_phases, losses, lr, rows, in_indices = _SHAPE.unpack_from(record, _SIZE)
        at = _SIZE + _SHAPE.size
        names = [phases[code] for code in record[at : at + in_phases]]
        rest = f"<{in_phases + losses + lr}d{_ROW * max(rows, 0)}s{max(in_indices, 0)}q"
        numbers = struct.unpack(rest, record[at + in_phases :])
    except (struct.error, IndexError) as error:
        raise ValueError(f"not a packed event: {error}") from error
    end = in_phases + losses + lr
    rates = [None if nones >> place & 1 else value for place, value in enumerate(numbers[in_phases:end])]
    data = payload(
        rates[:losses], rates[losses:], None if opt_step == _NONE else opt_step,
        None if sched_step == _NONE else sched_step, None if skipped < 0 else bool(skipped),
        None if rows < 0 else numbers[end], None if in_indices < 0 else numbers[end + 1 :],
        dict(zip(names, numbers, strict=False)),
    )  # fmt: skip
    return {"source": source, "rank": int(rank), "attempt": int(attempt), "seq": seq, "wall_s": wall_s,
            "mono_s": mono_s, "step": step, "data": data}  # fmt: skip
