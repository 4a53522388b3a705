"""Finds the tensor, element and byte at an offset in a file. If the byte belongs to no tensor, the part of the file."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

from ..layout import Checkpoint, Shard, TensorEntry

_NESTED = 64  # how many tensors before an offset are checked, because views of one storage may overlap it


@dataclass(frozen=True)
class Place:
    """The place of a byte. `element`: the index of its element in the whole tensor. None if the byte belongs to no
    tensor."""

    text: str
    tensor: str | None = None
    element: tuple[int, ...] | None = None
    byte: int = 0  # which byte of that element


class Places:
    def __init__(self, found: Checkpoint) -> None:
        self._shards: dict[str, list[tuple[int, int, TensorEntry, Shard]]] = defaultdict(list)
        for tensor in found.tensors.values():
            for shard in tensor.shards:
                extent = shard.extent
                self._shards[extent.file].append((extent.offset, extent.end, tensor, shard))
        for shards in self._shards.values():
            shards.sort(key=lambda entry: entry[:2])
        self._records: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for checksum in found.checksums:
            self._records[checksum.extent.file].append((checksum.extent.offset, checksum.extent.end, checksum.what))
        for records in self._records.values():
            records.sort()

    def at(self, file: str, offset: int) -> Place:
        shards = self._shards.get(file, [])
        last = bisect_right(shards, offset, key=lambda entry: entry[0]) - 1
        for begin, end, tensor, shard in reversed(shards[max(0, last - _NESTED) : last + 1]):
            if begin <= offset < end:
                element = _element(shard, (offset - begin) // tensor.item_size)
                index = ", ".join(map(str, element)) if element is not None else "?"
                return Place(f"{tensor.name}[{index}]", tensor.name, element, (offset - begin) % tensor.item_size)
        for begin, end, description in self._records.get(file, []):
            if begin <= offset < end:
                return Place(f"the description of {description}" if description else "a description")
        return Place(f"byte {offset}")

    def names(self, file: str, begin: int, end: int, most: int = 3) -> list[str]:
        """The names of the tensors that have bytes from `begin` to `end`: at most `most` names, then an ellipsis."""
        found = [entry[2].name for entry in self._shards.get(file, []) if entry[0] < end and entry[1] > begin]
        return [*dict.fromkeys(found[:most]), *(["…"] if len(found) > most else [])]


def _element(shard: Shard, place: int) -> tuple[int, ...] | None:
    """The index, in the whole tensor, of an element. `place`: how many elements after the first element of the
    shard."""
    index = []
    if shard.strides is None:
        for size in reversed(shard.sizes):
            place, rest = divmod(place, size)
            index.append(rest)
        index.reverse()
    else:  # the largest stride first; of several indices that share an element, the first one is returned
        found = [0] * len(shard.sizes)
        for at in sorted(range(len(shard.sizes)), key=lambda at: -shard.strides[at]):  # type: ignore[index]
            step = shard.strides[at]
            if step and shard.sizes[at] > 1:
                found[at] = min(place // step, shard.sizes[at] - 1)
                place -= found[at] * step
        if place:
            return None
        index = found
    return tuple(start + inner for start, inner in zip(shard.offsets, index, strict=True))
