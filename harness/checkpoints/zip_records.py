"""The records of a zip file and their CRCs. torch.save files are zips, and so is each item of a DCP file.

Also computes with CRC-32, as in zip and gzip: joins the CRCs of two parts, and finds a single flipped bit. A CRC is
linear over GF(2): one flipped bit changes it by a value that depends only on the bit's distance from the end. The
polynomial is primitive, so these values differ for the first 2^32 - 1 distances. So the distance is the discrete
logarithm of the difference of two CRCs, which is found by baby steps and giant steps. Two CRCs are joined as in zlib's
crc32_combine by Mark Adler.

Format: APPNOTE.TXT 6.3, section 4.3. torch stores records uncompressed, so that each is a plain sequence of bytes."""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass, replace

from .files import Files, Window
from .layout import Checksum, Extent, Unreadable, torn

try:
    from isal.isal_zlib import crc32 as crc32  # nine times as fast as zlib's
except ImportError:
    from zlib import crc32 as crc32


_POLYNOMIAL, _ORDER = 0xEDB88320, 0xFFFFFFFF
_BIGGEST = 1 << 29  # bytes; up to here each bit has its own value
Matrix = tuple[int, ...]


def combine(first: int, second: int, length: int) -> int:
    """The CRC of two parts together, from their CRCs. `length`: of the second part, in bytes."""
    bits = 8 * length % _ORDER
    for place in range(32):
        if bits >> place & 1:
            first = _apply(_SQUARES[place], first)
    return first ^ second


def locate(difference: int, length: int) -> tuple[int, int] | None:
    """The (byte, bit) whose flip changes the CRC of `length` bytes by `difference`. None if no single flip does."""
    if not difference or not 0 < length <= _BIGGEST:
        return None
    stride = 1 << max(4, (length.bit_length() + 1) // 2)
    near: dict[int, tuple[int, int]] = {}
    for bit in range(8):
        value = _TABLE[1 << bit]
        for distance in range(min(stride, length)):
            near.setdefault(value, (distance, bit))
            value = (value >> 8) ^ _TABLE[value & 0xFF]
    back = _power(-8 * stride % _ORDER)
    for base in range(0, length, stride):
        found = near.get(difference)
        if found and base + found[0] < length:
            return length - 1 - base - found[0], found[1]
        difference = _apply(back, difference)
    return None


def _table() -> Matrix:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _table()


def _apply(matrix: Matrix, vector: int) -> int:
    result = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


def _power(bits: int) -> Matrix:
    """The change of a CRC that `bits` more zero bits make, as a matrix over GF(2), stored by columns."""
    result: Matrix = tuple(1 << place for place in range(32))
    for place in range(32):
        if bits >> place & 1:
            square = _SQUARES[place]
            result = tuple(_apply(square, column) for column in result)
    return result


def _squares() -> tuple[Matrix, ...]:
    shift: Matrix = (_POLYNOMIAL, *(1 << place for place in range(31)))  # by one zero bit
    powers = [shift]
    for _ in range(31):
        powers.append(tuple(_apply(powers[-1], column) for column in powers[-1]))
    return tuple(powers)


_SQUARES = _squares()


_LOCAL = struct.Struct("<4s5H3L2H")
_COMPRESSED = (8, 9, 12, 14, 93)  # deflate, deflate64, bzip2, lzma, zstd
_DIRECTORY = 1 << 27  # bytes of the zip's directory at most


@dataclass(frozen=True)
class Record:
    name: str  # without the archive's folder, which is the first part
    extent: Extent
    crc: int
    problem: str | None = None
    packed: str = ""  # "compressed" or "encrypted", if its bytes are not the contents


def records(files: Files, path: str, offset: int, length: int, what: str = "torch.save file") -> dict[str, Record]:
    """All records of the zip at `offset`, by name. `what`: the kind of file, for messages. Raises Unreadable (torn) if
    the zip's directory is damaged."""
    made: dict[str, Record] = {}
    for info in _directory(files, path, offset, length, what):
        record = _record(files, path, offset, length, info)
        twice = f"it has two records {record.name}" if record.name in made else record.problem
        made[record.name] = replace(record, problem=twice)
    return made


def _directory(files: Files, path: str, offset: int, length: int, what: str) -> list[zipfile.ZipInfo]:
    if length >= 4 and files.read(path, offset, 4)[:2] != b"PK":
        raise torn(f"its first bytes are not those of a {what}")
    try:
        with zipfile.ZipFile(Window(files, path, offset, length, _DIRECTORY)) as archive:
            return archive.infolist()
    except OSError:
        raise
    except Exception as error:  # zipfile raises almost anything for a damaged directory
        if "not a zip file" in str(error):
            raise torn(f"not a complete {what}: its end is missing, after {length} bytes") from error
        raise torn(f"not a complete {what} ({str(error) or type(error).__name__})") from error


def _record(files: Files, path: str, offset: int, length: int, info: zipfile.ZipInfo) -> Record:
    """The record of an entry of the directory, compared with the header in front of its bytes."""
    name = info.filename.partition("/")[2] or info.filename
    if not 0 <= info.header_offset <= length - _LOCAL.size:
        raise torn(f"its record {name} begins beyond its end")
    head = files.read(path, offset + info.header_offset, _LOCAL.size)
    if len(head) < _LOCAL.size:
        raise torn(f"it ends before its record {name}")
    mark, _, flags, method, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack(head)
    start = info.header_offset + _LOCAL.size + name_length + extra_length
    if start + info.compress_size > length:
        raise torn(f"its record {name} ends beyond its end")
    if mark != b"PK\3\4":
        raise Unreadable(f"its record {name} is not at the place that its directory gives")
    called = files.read(path, offset + info.header_offset + _LOCAL.size, name_length)
    problem = packed = ""
    if called != info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437", "replace"):
        problem = f"its record {name} has another name in front of it"
    if info.flag_bits & 1 and flags & 1:
        packed = "encrypted"
    elif method in _COMPRESSED and method == info.compress_type:
        packed = "compressed"
    if packed:
        problem = f"its record {name} is {packed}"
    elif method or info.compress_type or info.compress_size != info.file_size:
        problem = f"its record {name} is compressed by one of its two headers only"
    return Record(name, Extent(path, offset + start, info.compress_size), info.CRC, problem or None, packed)


def checksums(found: dict[str, Record], what: str) -> list[Checksum]:
    """The CRCs of the records of an archive, as far as they are those of the bytes in the file."""
    if without_crcs(found):
        return []
    plain = (record for record in found.values() if record.extent.length and not record.packed)
    return [Checksum(record.extent, record.crc, what) for record in plain]


def without_crcs(found: dict[str, Record]) -> bool:
    """Whether no record has a CRC: torch can write 0 in place of all CRCs (torch.serialization.set_crc32_options)."""
    return all(record.crc == 0 for record in found.values() if record.extent.length)
