"""Folders that `save_distributed` of torch.distributed.checkpoint's HuggingFaceStorageWriter writes. Each rank's part
of each tensor is in a separate safetensors file, `shard-00001-model-....safetensors`, whose metadata gives the place of
the part. No file gives the shape of the whole tensor, so it is computed from the places and sizes of the parts.

Source: torch/distributed/checkpoint/hf_storage.py and _hf_utils.py."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ..files import Files
from ..layout import Checkpoint, Problem, Shard, TensorEntry, Unreadable
from ..pickle_globals import ints
from .dcp import check_boxes
from .format import Format
from .safetensors import Safetensors, header

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
