"""Files of torch.save: a zip with a pickle and one record for each storage, or the older form (torch < 1.6): several
pickles, followed by the storages. Lightning's .ckpt, nanoGPT's ckpt.pt and many others are such files.

Source: torch/serialization.py, `_save` and `_legacy_save`. No torch is needed, and no code from a pickle is run."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from ..files import Files, Window
from ..layout import (
    ITEM_SIZES,
    Checkpoint,
    Extent,
    Problem,
    Shard,
    TensorEntry,
    Trouble,
    Unreadable,
    limit,
    torn,
    unknown,  # fmt: skip
)
from ..pickle_globals import KNOWN, StorageRef, TensorRef, ints, storage_dtype
from ..pickles import MOST, read
from ..tensor_values import Contents
from ..zip_records import Record, checksums, records
from . import format_table
from .format import Format

MAGIC = 0x1950A86A20F9469CFC6C
ZIP, OLD = format_table.ZIP, b"\x80\x02\x8a\n" + MAGIC.to_bytes(10, "little") + b"."  # the first bytes of the two forms
_LEGACY = 1 << 24  # bytes that the pickles of the older form may have
_ZIP_END, _NO_COMMENT = b"PK\5\6", 22  # bytes
_END = 1 << 20  # bytes at the end of a file, in which the directory of a zip names its pickle
_SMALL = 1 << 20  # bytes of a plain pickle in which dangerous names are looked for


class TorchSave(Format):
    """Files of torch.save, as a zip or in the older form."""

    name = "torch"
    suffixes = (".pt", ".pth", ".pth.tar", ".ckpt", ".bin", ".pkl")
    starts = (ZIP, OLD)

    def read_file(self, files: Files, path: str, size: int, into: Checkpoint, prefix: str = "") -> None:
        start = files.read(path, 0, len(OLD))
        if not start:
            raise torn("empty")
        if start.startswith(ZIP):
            read_zip(files, path, 0, size, into, prefix)
        elif start == OLD:
            _read_legacy(files, path, size, into, prefix)
        else:
            raise _other(files, path, size, start, into)


def _other(files: Files, path: str, size: int, start: bytes, into: Checkpoint) -> Unreadable:
    """Why a file without the first bytes of torch.save can't be read: it is damaged only if other bytes of it show that
    torch.save wrote it."""
    if ZIP.startswith(start) or OLD.startswith(start):
        return torn("it is cut off in its first bytes")
    end = files.read(path, max(0, size - _END), _END)
    is_rest = end[-_NO_COMMENT:].startswith(_ZIP_END) and b"/data.pkl" in end
    if is_rest or sum(map(int.__ne__, start, OLD)) <= 2:
        return Unreadable("its first bytes are not those of a torch.save file, although the rest is")
    before = start.rstrip(b"\0")
    if before != start and (before or not path.endswith((".bin", ".pkl"))) and ZIP.startswith(before):
        return Unreadable("its first bytes are zero")
    if size <= _SMALL and format_table.is_pickle(start):
        _note_hostile(_dangerous(files, path, size), path, into)
    return format_table.instead(files, path, size) or unknown("its first bytes are of no kind that is known")


def _dangerous(files: Files, path: str, size: int) -> list[str]:
    try:
        return read(io.BytesIO(files.read(path, 0, size)), size, {})[1]
    except Unreadable:
        return []


def read_zip(
    files: Files, path: str, offset: int, length: int, into: Checkpoint, prefix: str, what: str | None = None
) -> None:
    """Reads a zip that is part of a file. Its contents go into `into`, under names that begin with `prefix`."""
    what = what or path.rpartition("/")[2]
    is_own = format_table.begins_as_own(files.read(path, offset, format_table.LOOK))
    found = records(files, path, offset, length, "torch.save file" if is_own else "zip archive")
    into.checksums += checksums(found, what)
    if "data.pkl" not in found or any(map(format_table.SCRIPT.search, found)):
        raise unknown(format_table.archive(found))
    packed = next((record for record in found.values() if record.packed), None)
    if packed:
        raise limit(f"its record {packed.name} is {packed.packed}, and is not read")
    for record in found.values():
        if record.problem:
            into.problems.append(Problem(Trouble.UNREADABLE, f"{what}: {record.problem}", path))
    if files.read(path, offset + length - _NO_COMMENT, 4) != _ZIP_END:
        into.problems.append(Problem(Trouble.UNREADABLE, f"{what}: there are bytes after its end", path))
    where = found["data.pkl"].extent
    value, bad = unpickle(files, where)
    _note_hostile(bad, path, into, what)
    if found.get("byteorder") and files.read(path, found["byteorder"].extent.offset, 6) == b"big":
        raise limit("it was written on a big-endian machine")
    add(value, storages(found), into, prefix, what)


def storages(found: Mapping[str, Record]) -> dict[str, Record]:
    """The records of the storages in a zip, by the key that tensors give."""
    return {name[5:]: record for name, record in found.items() if name.startswith("data/")}


def add(value: Any, places: dict[str, Record], into: Checkpoint, prefix: str, what: str) -> None:
    """Adds the contents of a pickle. `places`: the records of the pickle's storages, by key."""

    def tensor(name: str, ref: TensorRef) -> None:
        try:
            into.tensors[name] = entry(name, ref, places)
        except Unreadable as error:
            into.problems.append(Problem(error.kind, f"{what}: {name}: {error}", tensor=name))

    Contents(into.values, into.tensors, into.opaque).add(prefix, value, tensor)


def entry(name: str, ref: TensorRef, places: dict[str, Record]) -> TensorEntry:
    """The place of a tensor's bytes in its storage. Raises Unreadable if the storage is too small."""
    if ref.storage.location == "meta":
        return TensorEntry(name, ref.dtype, ref.size, ())
    if ref.storage.key not in places:
        raise torn(f"its storage {ref.storage.key[:40]} is missing")
    where, width = places[ref.storage.key].extent, ITEM_SIZES[ref.dtype]
    if where.length < ref.storage.bytes:
        raise torn(f"its storage has {where.length} bytes instead of {ref.storage.bytes}")
    count = 0 if 0 in ref.size else 1 + sum((size - 1) * step for size, step in zip(ref.size, ref.stride, strict=True))
    if (ref.offset + count) * width > where.length:
        raise Unreadable("it reaches beyond its storage")
    extent = Extent(where.file, where.offset + ref.offset * width, count * width)
    strides = None if 0 in ref.size or ref.stride == contiguous(ref.size, ref.stride) else ref.stride
    return TensorEntry(name, ref.dtype, ref.size, (Shard((0,) * len(ref.size), ref.size, extent, strides),))


def contiguous(size: tuple[int, ...], like: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The strides of a tensor in row-major order. The stride of a dimension of size 1 has no effect, and is copied from
    `like`."""
    strides, step = [0] * len(size), 1
    for place in reversed(range(len(size))):
        strides[place] = like[place] if size[place] == 1 and like else step
        step *= size[place]
    return tuple(strides)


def storage_ref(pid: Any) -> Any:
    """The storage to which a persistent id refers: ("storage", type, key, location, count), with a sixth element in the
    older form. For a module: its source text. Raises Unreadable for anything else."""
    if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
        return pid[1]
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] not in ("storage", b"storage"):
        raise Unreadable("it refers to something that is no storage")
    (count,) = ints([pid[4]])
    return StorageRef(str(pid[2]), storage_dtype(pid[1]), count, str(pid[3]))


def _note_hostile(bad: list[str], path: str, into: Checkpoint, what: str = "") -> None:
    if bad:
        name = what or path.rpartition("/")[2]
        text = f"{name}: loading it without weights_only would run {', '.join(bad[:3])}"
        into.problems.append(Problem(Trouble.HOSTILE, text, path))


def unpickle(files: Files, where: Extent) -> tuple[Any, list[str]]:
    """The value of a pickle with storages, and the dangerous names in it. Raises Unreadable if the pickle is damaged,
    or needs what is not supported."""
    if where.length > MOST:
        raise limit(f"its pickle has {where.length} bytes, more than are read")
    return read(io.BytesIO(files.read(where.file, where.offset, where.length)), where.length, KNOWN, storage_ref)


def _read_legacy(files: Files, path: str, size: int, into: Checkpoint, prefix: str) -> None:
    what = path.rpartition("/")[2]
    # The library's reader reads single bytes, so a buffer is used. The reader never reads beyond the end of a pickle.
    bound = min(size, _LEGACY)
    file = io.BufferedReader(Window(files, path, 0, bound), 1 << 16)
    magic, _ = read(file, bound, {})
    if magic != MAGIC:
        raise Unreadable("not a file of torch.save")
    for _ in range(2):  # the version of the protocol, and the machine that wrote it
        read(file, bound, {})
    value, bad = read(file, bound, KNOWN, storage_ref)
    keys, _ = read(file, bound, {})
    _note_hostile(bad, path, into)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise Unreadable("its list of storages is not a list")
    widths = _widths(value)
    places, at = {}, file.tell()
    for key in keys:
        head = files.read(path, at, 8)
        if len(head) < 8:
            raise torn("it is cut off in its storages")
        length = int.from_bytes(head, "little") * widths.get(key, 1)
        if at + 8 + length > size:
            raise torn(f"it is cut off in its storage {key[:40]}")
        places[key] = Record(key, Extent(path, at + 8, length), 0)
        at += 8 + length
    if at < size:
        text = f"{what}: {size - at} bytes too many at its end"
        into.problems.append(Problem(Trouble.UNREADABLE, text, path, offset=at))
    add(value, places, into, prefix, what)


def _widths(value: Any) -> dict[str, int]:
    """The item size of each storage. In the older form, the lengths of storages are in elements."""
    found: dict[str, int] = {}

    def tensor(name: str, ref: TensorRef) -> None:
        found[ref.storage.key] = ITEM_SIZES[ref.storage.dtype]

    Contents({}, {}, []).add("", value, tensor)
    return found
