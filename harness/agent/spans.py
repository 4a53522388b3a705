"""Where what was digested in memory lies in the file that a library wrote by itself; and what else is in that file."""

from __future__ import annotations

import json
import struct
import zipfile
from typing import BinaryIO, Iterator
from zlib import crc32

from .hashing import CHUNK, xxh3_64

_READ = 1 << 20


def spans_of_zip(file: BinaryIO, digests: dict[str, tuple[int, str]]) -> list[tuple[int, int, str]]:
    """Where the records of a torch.save file lie. Raises ValueError where one is not there."""
    found = []
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            known = digests.get(info.filename.partition("/")[2])
            if known:
                file.seek(info.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", file.read(4))
                found.append((info.header_offset + 30 + name_length + extra_length, *known))
    if len(found) != len(digests):
        raise ValueError("a record that was written is not in the file")
    return sorted(found)


def spans_of_safetensors(file: BinaryIO, digests: dict[str, tuple[int, str]]) -> list[tuple[int, int, str]]:
    """Where the tensors of a safetensors file lie. Raises ValueError where one is not there."""
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    return sorted((8 + length + header[name]["data_offsets"][0], *known) for name, known in digests.items())


def rest_of(file: BinaryIO, size: int, spans: list[tuple[int, int, str]]) -> str:
    """The digest of all bytes of a file that are in no span."""
    digester = None if xxh3_64 is None else xxh3_64()
    crc = 0
    for begin, end in gaps(size, [(offset, length) for offset, length, _ in spans]):
        file.seek(begin)
        while begin < end:
            part = file.read(min(_READ, end - begin))
            if not part:
                raise ValueError("it became shorter")
            crc = crc32(part, crc)
            if digester is not None:
                digester.update(part)
            begin += len(part)
    return (digester.hexdigest() if digester is not None else "") + f"{crc:08x}"


def with_crcs(file: BinaryIO, spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]] | None:
    """The same spans, with a CRC-32 behind each xxh3; None where the file is not what was in memory."""
    found = []
    for offset, length, digests in spans:
        parts = []
        file.seek(offset)
        for number, at in enumerate(range(0, length, CHUNK)):
            data, digest = file.read(min(CHUNK, length - at)), digests[16 * number : 16 * number + 16]
            if xxh3_64(data).hexdigest() != digest:
                return None
            parts.append(f"{digest}{crc32(data):08x}")
        found.append((offset, length, "".join(parts)))
    return found


def differs(file: BinaryIO, spans: list[tuple[int, int, str]]) -> bool:
    """Whether the file is not what was in memory when the spans were digested."""
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
    """What lies between spans, and before and after them: begin and end."""
    at = 0
    for offset, length in sorted(spans):
        if offset > at:
            yield at, offset
        at = max(at, offset + length)
    if at < size:
        yield at, size
