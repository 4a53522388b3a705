"""safetensors files: 8 bytes with the length of a JSON header, the header, the tensors.

https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ..files import Files
from ..layout import ITEM_SIZES, Checkpoint, Extent, Problem, Shard, TensorEntry, Trouble, Unreadable, torn, unknown
from ..pickle_globals import ints
from ..tensor_values import Contents
from . import format_table
from .format import Format

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "C128": "complex128", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_BITS = re.compile(r"[A-Z]{1,6}(\d{1,3})(_[A-Z0-9]+)?")  # of a type, by its name; also of a future one
HEADER = 100_000_000  # bytes: the limit of the library
_LOOK = 1024  # bytes, in which a header, if it is one, describes a tensor


def header(files: Files, path: str, size: int) -> tuple[dict[str, Any], int]:
    """The header, and the offset in bytes of the first tensor. Raises Unreadable if there is no such header, OSError if
    the file can't be read."""
    start = files.read(path, 0, _LOOK)
    length = int.from_bytes(start[:8], "little") if size >= 8 else 0
    if start[8:9] != b"{" and any(start) and b'"dtype"' not in start and size > 8:
        raise format_table.instead(files, path, size) or unknown("its first bytes are of no kind that is known")
    if size < 8 or 8 + length > size:
        raise torn("cut off in its header")
    if length > HEADER:
        raise Unreadable("its header is longer than the format allows")
    try:
        found = json.loads(files.read(path, 8, length).decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"its header is no JSON: {str(error)[:100]}") from error
    if not isinstance(found, dict):
        raise Unreadable("its header is no JSON object")
    return found, 8 + length


class Safetensors(Format):
    """Files of safetensors."""

    name = "safetensors"
    asked = 90
    suffixes = (".safetensors",)
    model_only = True

    def is_file(self, start: bytes) -> bool:
        """The format has no magic number: its files begin with a length, and then the JSON."""
        return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= HEADER

    def read_file(self, files: Files, path: str, size: int, into: Checkpoint, prefix: str = "") -> None:
        entries, start = header(files, path, size)
        metadata = entries.pop("__metadata__", {})
        Contents(into.values, into.tensors, into.opaque).add(prefix, metadata, lambda name, ref: None)
        spans = []
        for name, item in entries.items():
            if isinstance(item, dict) and _is_of_new_type(item):
                text = f"{path.rpartition('/')[2]}: {name} is of the type {item['dtype']}, which is not read"
                into.problems.append(Problem(Trouble.LIMIT, text, path, prefix + name))
                begin, stop = _offsets(item, name)
                spans.append((start + begin, start + stop, name))
                continue
            made = _entry(prefix + name, item, path, start)
            into.tensors[made.name] = made
            spans.append((made.shards[0].extent.offset, made.shards[0].extent.end, name))
        end = start
        for begin, stop, name in sorted(spans):  # the format wants no gaps
            if begin != end:
                raise Unreadable(f"{name} does not begin where the tensor before it ends", Trouble.OVERLAP)
            end = stop
        if end > size:
            raise torn(f"{size} bytes instead of the {end} in its header")
        if end < size:
            text = f"{path.rpartition('/')[2]}: {size} bytes instead of the {end} in its header"
            into.problems.append(Problem(Trouble.UNREADABLE, text, path, offset=end))


def _is_of_new_type(item: Mapping[str, Any]) -> bool:
    """Whether a tensor has a type that is not read (such as one of less than a byte), but as many bytes as the type's
    name says."""
    bits = _BITS.fullmatch(str(item.get("dtype")))
    shape, offsets = ints(item.get("shape")), ints(item.get("data_offsets"))
    if bits is None or item["dtype"] in DTYPES or len(offsets) != 2:
        return False
    return 8 * (offsets[1] - offsets[0]) == math.prod(shape) * int(bits[1])


def _offsets(item: dict[str, Any], name: str) -> tuple[int, int]:
    offsets = ints(item.get("data_offsets"))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Unreadable(f"its header has no valid place of {name[:80]}")
    return offsets


def _entry(name: str, item: Any, path: str, start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = item["dtype"], ints(item["shape"]), ints(item["data_offsets"])
        known = DTYPES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"its header has no valid description of {name[:80]}: {str(error)[:60]}") from error
    if end - begin != math.prod(shape) * ITEM_SIZES[known]:
        raise Unreadable(f"its header gives {name[:80]} {end - begin} bytes, which its shape and type don't fill")
    return TensorEntry(name, known, shape, (Shard((0,) * len(shape), shape, Extent(path, start + begin, end - begin)),))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found
