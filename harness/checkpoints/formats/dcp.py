"""Folders of torch.distributed.checkpoint, also those with safetensors files.

`Dcp`: the pickle `.metadata` gives the place, in the files `*.distcp`, of each part of each tensor. Each item is a
separate torch.save file (a zip). If it was written with SerializationFormat.SAFETENSORS, it is a sequence of raw bytes
in a safetensors file. Source: torch/distributed/checkpoint/metadata.py and filesystem.py. No torch is needed.

`DcpSafetensors`: folders of HuggingFaceStorageWriter with `save_distributed`. Each rank's part of each tensor is in a
separate safetensors file, `shard-00001-model-....safetensors`, whose metadata gives the place of the part. No file
gives the shape of the whole tensor, so it is computed from the places and sizes of the parts.

Source: torch/distributed/checkpoint/hf_storage.py and _hf_utils.py."""

from __future__ import annotations

import io
import json
import math
import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ..files import Files
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
    unknown,
)
from ..pickle_globals import KNOWN, TensorRef, dtype_name, ints
from ..pickles import MOST, Opaque, read
from ..zip_records import checksums, records
from . import format_table, torch_save
from .format import Format
from .safetensors import Safetensors, header

METADATA = ".metadata"
_PAIRS = 2000  # the most parts of one tensor that are compared each with each
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
Places = dict[tuple[str, "tuple[int, ...] | None"], dict[str, Any]]


class Dcp(Format):
    """Folders of torch.distributed.checkpoint."""

    name = "dcp"
    asked = 20
    parts = (".distcp",)
    metadata = (METADATA,)
    one_save = True

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return METADATA in names or any(name.endswith(self.parts) for name in names)

    def read_parts(
        self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str
    ) -> Collection[str]:
        if METADATA in names:
            self.read_folder(files, folder, into, prefix)
        return ()

    def read_folder(self, files: Files, folder: str, into: Checkpoint, prefix: str = "") -> None:
        """Reads a folder. Raises Unreadable or OSError if there is no metadata. Problems of single tensors are added to
        `into`."""
        described, places = _metadata(files, folder, into)
        reader = _Items(files, folder, into)
        gone: dict[str, list[str]] = {}
        for name, what in described.items():
            try:
                if what.what.name == "BytesStorageMetadata":
                    reader.values(prefix, name, places)
                else:
                    reader.tensor(prefix, name, what, places)
            except FileNotFoundError as error:
                gone.setdefault(posixpath.basename(str(error.filename)), []).append(name)
            except Unreadable as error:
                _note(into, prefix + name, error)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                text = f"its entry in {METADATA} can't be used ({type(error).__name__}: {error})"
                _note(into, prefix + name, Unreadable(text))
        for file, names in gone.items():
            held = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            into.problems.append(Problem(Trouble.TORN, f"{prefix}{file}: missing; it held {held}", f"{folder}/{file}"))
        reader.overlaps()


def _note(into: Checkpoint, name: str, error: Unreadable) -> None:
    into.problems.append(Problem(error.kind, f"{name}: {error}", tensor=name))


def _metadata(files: Files, folder: str, into: Checkpoint) -> tuple[dict[str, Opaque], Places]:
    path = f"{folder}/{METADATA}"
    try:
        size = files.size(path)
    except FileNotFoundError:
        raise torn("there is no .metadata, which is written last") from None
    if size > MOST:
        raise limit(f".metadata has {size} bytes, more than are read")
    other = None if files.read(path, 0, 2).startswith(format_table.PICKLES) else format_table.words(files, path, size)
    if size and other and not any(name.endswith(Dcp.parts) for name in files.names(folder)):
        raise unknown(f"its {METADATA} is no list of tensors, but {other}")
    try:
        value, bad = read(io.BytesIO(files.read(path, 0, size)), size, KNOWN)
        if bad:
            text = f"{METADATA}: loading it would run {', '.join(bad[:3])}"
            into.problems.append(Problem(Trouble.HOSTILE, text, path))
        state = _state(value, "Metadata")
        described, storage = state["state_dict_metadata"], state["storage_data"]
        if not all(isinstance(name, str) and isinstance(what, Opaque) for name, what in described.items()):
            raise Unreadable("its list of entries is not a list")
        places: Places = {}
        for index, place in storage.items():
            about = _state(index, "MetadataIndex")
            offset = about.get("offset")
            places[str(about["fqn"]), None if offset is None else ints(offset)] = _state(place, "_StorageInfo")
        return described, places
    except Unreadable as error:
        kind = error.kind if error.kind in (Trouble.LIMIT, Trouble.UNKNOWN) else Trouble.TORN
        raise Unreadable(f".metadata can't be read: {error}", kind) from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise torn(f".metadata can't be read: {type(error).__name__}: {error}") from error


def _state(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Opaque) or value.what.name != name or not isinstance(value.state, dict):
        raise Unreadable(f"an object that should be a {name} is not")
    return value.state


class _Items:
    def __init__(self, files: Files, folder: str, into: Checkpoint) -> None:
        self._files, self._folder, self._into = files, folder, into
        self._sizes: dict[str, int] = {}
        self._taken: list[tuple[str, int, int, str]] = []

    def values(self, prefix: str, name: str, places: Places) -> None:
        """Reads an object that is no tensor: a torch.save file without storages, or with small storages."""
        place = places.get((name, None))
        if place is None:
            raise torn("it was never written")
        path, offset, length = self._place(place, name)
        torch_save.read_zip(self._files, path, offset, length, self._into, prefix + name, name)

    def tensor(self, prefix: str, name: str, what: Opaque, places: Places) -> None:
        about = _state(what, "TensorStorageMetadata")
        dtype, shape = _dtype(about["properties"]), ints(about["size"])
        shards = []
        for chunk in about["chunks"]:
            box = _state(chunk, "ChunkStorageMetadata")
            offsets, sizes = ints(box["offsets"]), ints(box["sizes"])
            place = places.get((name, offsets), places.get((name, None)))
            if place is None:
                raise torn(f"the chunk at {offsets} was never written")
            shards.append(self._shard(name, dtype, offsets, sizes, place))
        check_boxes(shape, [(shard.offsets, shard.sizes) for shard in shards])
        ordered = tuple(sorted(shards, key=lambda shard: shard.offsets))
        self._into.tensors[prefix + name] = TensorEntry(prefix + name, dtype, shape, ordered)

    def overlaps(self) -> None:
        """Adds a problem for bytes that belong to two items."""
        end, owner = ("", 0), ""
        for path, begin, stop, name in sorted(self._taken):
            if path == end[0] and begin < end[1]:
                text = f"{name}: its bytes in {posixpath.basename(path)} belong to {owner} too"
                self._into.problems.append(Problem(Trouble.OVERLAP, text, path, name, offset=begin))
            if (path, stop) > end:
                end, owner = (path, stop), name

    def _place(self, place: dict[str, Any], name: str) -> tuple[str, int, int]:
        relative = str(place["relative_path"])
        if place.get("transform_descriptors"):
            raise limit("it is compressed or transformed by an extension of its writer")
        offset, length = ints([place["offset"], place["length"]])
        if posixpath.isabs(relative) or ".." in relative.split("/") or "\0" in relative:
            raise Unreadable(f"its file {relative[:60]!r} is not in the folder")
        path = f"{self._folder}/{relative}"
        if path not in self._sizes:
            self._sizes[path] = self._files.size(path)
        if offset + length > self._sizes[path]:
            raise torn(f"{relative} is cut off")
        self._taken.append((path, offset, offset + length, name))
        return path, offset, length

    def _shard(
        self, name: str, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], place: dict[str, Any]
    ) -> Shard:
        path, offset, length = self._place(place, name)
        wanted = math.prod(sizes) * ITEM_SIZES[dtype]
        if path.endswith(".safetensors"):
            if length != wanted:
                raise torn(f"its part at {offsets} has {length} bytes instead of {wanted}")
            return Shard(offsets, sizes, Extent(path, offset, length))
        found = records(self._files, path, offset, length)
        self._into.checksums += checksums(found, name)
        if "data.pkl" not in found:
            raise torn(f"its part at {offsets} has no data.pkl")
        ref, _bad = torch_save.unpickle(self._files, found["data.pkl"].extent)
        if not isinstance(ref, TensorRef) or ref.dtype != dtype or ref.size != sizes:
            raise Unreadable(f"its part at {offsets} is not the tensor that .metadata describes")
        (inner,) = torch_save.entry(name, ref, torch_save.storages(found)).shards
        return Shard(offsets, sizes, inner.extent, inner.strides)


def check_boxes(shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Checks that boxes fill a tensor without gap or overlap. Raises Unreadable otherwise."""
    for offsets, sizes in boxes:
        inside = len(offsets) == len(sizes) == len(shape)
        if not inside or any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            raise Unreadable(f"its part at {offsets} reaches beyond it", Trouble.OVERLAP)
    solid = sorted(box for box in boxes if 0 not in box[1])
    if sum(math.prod(sizes) for _, sizes in solid) < math.prod(shape):
        raise torn("its chunks are not the whole tensor")
    if not _is_grid(shape, solid):
        _check_pairs(shape, solid)


def _is_grid(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether the boxes are all cells of a grid, as in nearly every sharding."""
    cuts = [sorted({offsets[place] for offsets, _ in boxes}) for place in range(len(shape))]
    if math.prod(map(len, cuts)) != len(boxes) or len({offsets for offsets, _ in boxes}) != len(boxes):
        return False
    ends = [dict(zip(cut, [*cut[1:], whole], strict=True)) for cut, whole in zip(cuts, shape, strict=True)]
    starts_at_zero = all(cut[0] == 0 for cut in cuts) if boxes else True
    return starts_at_zero and all(
        start + size == end[start]
        for offsets, sizes in boxes
        for start, size, end in zip(offsets, sizes, ends, strict=True)
    )


def _check_pairs(shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Checks that no two boxes overlap. Their volumes add up to that of the tensor, so boxes without overlap also leave
    no gap. Raises Unreadable otherwise."""
    if len(boxes) > _PAIRS:
        raise Unreadable(f"it has {len(boxes)} parts in no regular order")
    for place, (offsets, sizes) in enumerate(boxes):
        for other, extent in boxes[place + 1 :]:
            if shape and other[0] >= offsets[0] + sizes[0]:
                break  # they are sorted by their first offsets
            if all(a < o + e and o < a + s for a, s, o, e in zip(offsets, sizes, other, extent, strict=True)):
                raise Unreadable(f"its parts at {offsets} and {other} overlap", Trouble.OVERLAP)


def _dtype(properties: Any) -> str:
    state = getattr(properties, "state", None)
    if isinstance(state, dict):
        return dtype_name(state.get("dtype"))
    if isinstance(state, tuple) and state:
        return dtype_name(state[0])
    raise Unreadable("a tensor without properties")


_PART = re.compile(r"^shard-(\d{5})-.+\.safetensors$")
_INFO = "DCP_SHARDING_INFO"


class DcpSafetensors(Format):
    """Folders of torch.distributed.checkpoint's HuggingFaceStorageWriter."""

    name = "dcp_safetensors"
    asked = 30
    model_only = True

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return any(map(_PART.match, names))

    def read_parts(
        self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str
    ) -> Collection[str]:
        parts = [name for name in names if _PART.match(name)]
        _read(files, folder, parts, into, prefix)
        return parts


def _read(files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
    """Reads all parts in a folder, and joins them. Problems of single files are added to `into`."""
    parts: dict[str, list[tuple[TensorEntry, Shard]]] = defaultdict(list)
    for name in names:
        path = f"{folder}/{name}"
        try:
            for tensor, offsets in _parts_of(files, path, into):
                parts[tensor.name].append((tensor, replace(tensor.shards[0], offsets=offsets)))
        except (Unreadable, OSError) as error:
            kind = error.kind if isinstance(error, Unreadable) else Unreadable("").kind
            into.problems.append(Problem(kind, f"{prefix}{name}: {error}", path))
    for name, found in parts.items():
        shards = tuple(sorted((shard for _, shard in found), key=lambda shard: shard.offsets))
        try:
            shape = tuple(map(max, zip(*(_reach(shard) for shard in shards), strict=True)))
            check_boxes(shape, [(shard.offsets, shard.sizes) for shard in shards])
            into.tensors[prefix + name] = TensorEntry(prefix + name, found[0][0].dtype, shape, shards)
        except Unreadable as error:
            into.problems.append(Problem(error.kind, f"{prefix}{name}: {error}", tensor=name))
        except ValueError:
            into.problems.append(Problem(Unreadable("").kind, f"{prefix}{name}: its parts differ in dimensions"))


def _parts_of(files: Files, path: str, into: Checkpoint) -> list[tuple[TensorEntry, tuple[int, ...]]]:
    size = files.size(path)
    inside = Checkpoint(path, Safetensors.name)
    Safetensors().read_file(files, path, size, inside)
    into.problems += inside.problems
    places = _info(header(files, path, size)[0])
    return [(entry, ints(places[name]["saved_offsets"])) for name, entry in inside.tensors.items()]


def _info(described: dict[str, Any]) -> dict[str, Any]:
    try:
        places = json.loads(described["__metadata__"][_INFO])
        if not all(isinstance(load["saved_offsets"], list) for load in places.values()):
            raise ValueError("no offsets")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Unreadable(f"its metadata does not give the places of its parts: {str(error)[:60]}") from error
    return _Places(places)


class _Places(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise Unreadable(f"its metadata does not give the place of {name[:60]}")


def _reach(shard: Shard) -> tuple[int, ...]:
    if len(shard.offsets) != len(shard.sizes):
        raise Unreadable("the place of a part has other dimensions than the part")
    return tuple(start + size for start, size in zip(shard.offsets, shard.sizes, strict=True))
