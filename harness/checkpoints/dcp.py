"""Reads a DCP folder as torch.distributed.checkpoint.FileSystemWriter writes it: `.metadata` and `*.distcp`.

Each item in a `.distcp` file is a torch.save file of its own; `.metadata` says where each one lies, and which part of
which tensor it is. Standard library and torch only, see reader.py.
"""

from __future__ import annotations

import enum
import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch

from .contents import Contents, Damaged, Unsafe, check_crcs, load, tensor_digest


class _MetadataUnpickler(pickle.Unpickler):
    """DCP's `.metadata` is a pickle. It is opened with the few classes that describe tensors, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3, Debian 12's too, pickle an enum so
            return _member
        known = (
            module in ("torch.distributed.checkpoint.metadata", "torch.serialization", "collections")
            or (module, name) in (("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"))
            or (module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)))
            or (module.startswith("pathlib") and name.endswith("Path"))
        )
        if not known or (module == "torch.serialization" and name != "_get_layout"):
            raise Unsafe(f"not opened: its .metadata names {module}.{name}")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """getattr, on an enum and for one of its members."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise Unsafe("not opened: its .metadata takes an attribute of something that is not an enum")
    return kind.__members__[name]


def read_dcp(folder: Path, found: Contents, prefix: str = "") -> None:
    try:
        with open(folder / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise Damaged("there is no .metadata, which is written last") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, ValueError) as error:
        raise Damaged(f".metadata can't be read: {error}") from error
    places: dict[str, list[tuple[Any, Any]]] = {}
    for index, place in metadata.storage_data.items():
        places.setdefault(index.fqn, []).append((index, place))
    for name, description in metadata.state_dict_metadata.items():
        with found.noting(name):
            if type(description).__name__ == "BytesStorageMetadata":
                (_, place), *_ = places[name]
                found.add(prefix + name, load(_slice(folder, place, found, name)))
            else:
                found.tensors[prefix + name] = tensor_digest(_assemble(folder, description, places[name], found, name))


def _assemble(
    folder: Path, description: Any, places: list[tuple[Any, Any]], found: Contents, name: str
) -> torch.Tensor:
    """The whole tensor, from the chunks that the ranks wrote. One tensor at a time is in memory."""
    whole = torch.empty(description.size, dtype=description.properties.dtype)
    sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in description.chunks}
    if sum(math.prod(size) for size in sizes.values()) != whole.numel():
        raise Damaged("its chunks are not the whole tensor")
    stored = {tuple(index.offset or (0,) * whole.dim()): place for index, place in places}
    for offsets, size in sizes.items():
        if offsets not in stored:
            raise Damaged(f"the chunk at {offsets} was never written")
        chunk = load(_slice(folder, stored[offsets], found, name))
        where = tuple(slice(start, start + length) for start, length in zip(offsets, size, strict=True))
        whole[where] = chunk.view(size)
    return whole


def _slice(folder: Path, place: Any, found: Contents, name: str) -> io.BytesIO:
    with open(folder / place.relative_path, "rb") as file:
        file.seek(place.offset)
        data = io.BytesIO(file.read(place.length))
    if len(data.getbuffer()) < place.length:
        raise Damaged(f"{place.relative_path} is cut off")
    with found.noting(name):
        check_crcs(data)
    data.seek(0)
    return data
