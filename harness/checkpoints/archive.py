"""The records of a zip file and their CRCs. torch.save files are zips, and so is each item of a DCP file.

Format: APPNOTE.TXT 6.3, section 4.3. torch stores records uncompressed, so that each is a plain sequence of bytes.
"""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass

from .files import Files, Window
from .layout import Checksum, Extent, torn

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
    if length >= 4 and files.read(path, offset, 4)[:2] != b"PK":
        raise torn(f"its first bytes are not those of a {what}")
    window = Window(files, path, offset, length, _DIRECTORY)
    try:
        with zipfile.ZipFile(window) as archive:
            infos = archive.infolist()
    except OSError:
        raise
    except Exception as error:  # zipfile raises almost anything for a damaged directory
        raise torn(f"not a complete {what} ({str(error) or type(error).__name__})") from error
    made: dict[str, Record] = {}
    for info in infos:
        name = info.filename.partition("/")[2] or info.filename
        if not 0 <= info.header_offset <= length - _LOCAL.size:
            raise torn(f"its record {name} begins beyond its end")
        head = files.read(path, offset + info.header_offset, _LOCAL.size)
        if len(head) < _LOCAL.size:
            raise torn(f"it ends before its record {name}")
        mark, _, flags, method, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack(head)
        start = info.header_offset + _LOCAL.size + name_length + extra_length
        if mark != b"PK\3\4" or start + info.compress_size > length:
            raise torn(f"its record {name} is not at the place that its directory gives")
        called = files.read(path, offset + info.header_offset + _LOCAL.size, name_length)
        problem, packed = None, ""
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
        if name in made:
            problem = f"it has two records {name}"
        made[name] = Record(name, Extent(path, offset + start, info.compress_size), info.CRC, problem, packed)
    return made


def checksums(found: dict[str, Record], what: str) -> list[Checksum]:
    """The CRCs of the records of an archive, as far as they are those of the bytes in the file."""
    if without_crcs(found):
        return []
    plain = (record for record in found.values() if record.extent.length and not record.packed)
    return [Checksum(record.extent, record.crc, what) for record in plain]


def without_crcs(found: dict[str, Record]) -> bool:
    """Whether no record has a CRC: torch can write 0 in place of all CRCs (torch.serialization.set_crc32_options)."""
    return all(record.crc == 0 for record in found.values() if record.extent.length)
