"""Finds the places of digested tensors in their file (spans), after tensors were digested in memory. Also digests the
rest of the file."""

from __future__ import annotations

import json
import struct
import zipfile
from typing import BinaryIO, Iterator
from zlib import crc32

from .hashing import CHUNK, xxh3_64

_READ = 1 << 20


def spans_of_zip(file: BinaryIO, digests: dict[str, tuple[int, str]]) -> list[tuple[int, int, str]]:
    """The (offset, bytes, digests) of each record of a torch.save file. Raises ValueError if a record is missing."""
    spans = []
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            known = digests.get(info.filename.partition("/")[2])
            if known:
                file.seek(info.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", file.read(4))
                spans.append((info.header_offset + 30 + name_length + extra_length, *known))
    if len(spans) != len(digests):
        raise ValueError("a record that was written is not in the file")
    return sorted(spans)


def spans_of_safetensors(file: BinaryIO, digests: dict[str, tuple[int, str]]) -> list[tuple[int, int, str]]:
    """The spans of the tensors of a safetensors file. Raises KeyError if a tensor is missing."""
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    return sorted((8 + length + header[name]["data_offsets"][0], *known) for name, known in digests.items())


def rest_of(file: BinaryIO, size: int, spans: list[tuple[int, int, str]]) -> str:
    """The digest of all bytes that are in no span. Raises ValueError if the file is shorter than `size` bytes."""
    digester = None if xxh3_64 is None else xxh3_64()
    crc = 0
    for begin, end in gaps(size, [(offset, length) for offset, length, _ in spans]):
        file.seek(begin)
        while begin < end:
            part = file.read(min(_READ, end - begin))
            if not part:
                raise ValueError("the file became shorter")
            crc = crc32(part, crc)
            if digester is not None:
                digester.update(part)
            begin += len(part)
    return (digester.hexdigest() if digester is not None else "") + f"{crc:08x}"


def with_crcs(file: BinaryIO, spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]] | None:
    """The same spans with a CRC-32 after each xxh3. None if the file differs from the memory at the time of the
    save."""
    result = []
    for offset, length, digests in spans:
        parts = []
        file.seek(offset)
        for number, at in enumerate(range(0, length, CHUNK)):
            data, digest = file.read(min(CHUNK, length - at)), digests[16 * number : 16 * number + 16]
            if xxh3_64(data).hexdigest() != digest:
                return None
            parts.append(f"{digest}{crc32(data):08x}")
        result.append((offset, length, "".join(parts)))
    return result


def differs(file: BinaryIO, spans: list[tuple[int, int, str]]) -> bool:
    """Whether the file differs from the memory at the time when the spans were digested."""
    width = 8 if xxh3_64 is None else 16
    for offset, length, digests in spans:
        file.seek(offset)
        for number, at in enumerate(range(0, length, CHUNK)):
            data = file.read(min(CHUNK, length - at))
            now = f"{crc32(data):08x}" if xxh3_64 is None else xxh3_64(data).hexdigest()
            if now != digests[width * number : width * (number + 1)]:
                return True
    return False


def gaps(size: int, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The (begin, end) of each part of a file of `size` bytes that no span (offset, bytes) covers."""
    at = 0
    for offset, length in sorted(spans):
        if offset > at:
            yield at, offset
        at = max(at, offset + length)
    if at < size:
        yield at, size
