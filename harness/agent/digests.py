"""A digest per sample of a batch, so that samples can be accounted for whatever the ranks and batches they come in.

A row is one sample: the same entry of every tensor of the batch that shares the first dimension. Its digest is blake2b
(6 bytes, hex) over at most 4 KiB of its bytes: the head, the tail and a stride in between.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Iterator, Mapping, Sequence

MAX_ROW_BYTES = 4096
MAX_ROWS = 512  # beyond it a digest is of several rows
_MAX_LEAVES = 64
_END = 32  # bytes at either end of a tensor that it is recognised by


@dataclass(eq=False)
class Batch:
    """What a batch is known by once it is gone: no tensor is kept alive."""

    rows: tuple[str, ...] | None  # None: nothing in it could be read
    indices: tuple[int, ...] | None = None
    storages: frozenset[int] = frozenset()  # addresses
    ends: frozenset[tuple[Any, ...]] = frozenset()
    used: bool = False  # it has been trained on


def _leaves(value: Any) -> Iterator[Any]:
    """The tensors, arrays, strings and bytes in nested containers, in order; bounded, and safe with cycles."""
    left = _MAX_LEAVES
    stack = [value]
    while stack and left:
        item = stack.pop()
        left -= 1
        if isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())[:_MAX_LEAVES]))
        elif isinstance(item, (list, tuple)) and not _is_texts(item):
            stack.extend(reversed(item[:_MAX_LEAVES]))
        elif hasattr(item, "__dataclass_fields__") and not hasattr(item, "shape"):
            stack.extend(reversed(list(vars(item).values())[:_MAX_LEAVES]))
        elif item is not None:
            yield item


def _is_texts(item: Sequence[Any]) -> bool:
    return bool(item) and isinstance(item[0], (str, bytes))


class View:
    """The bytes of one tensor, array or list of texts, row by row. `data` is read only when it is asked for."""

    def __init__(self, leaf: Any, count: int, storage: int, kind: tuple[Any, ...]) -> None:
        self.count, self.storage, self._kind = count, storage, kind
        self._leaf = leaf  # kept while its memory is read

    @cached_property
    def data(self) -> memoryview:
        return memoryview(self._leaf).cast("B")

    @cached_property
    def ends(self) -> tuple[Any, ...]:
        return (*self._kind, bytes(self.data[:_END]), bytes(self.data[-_END:]))

    def feed(self, digest: Any, first: int, last: int, bound: int) -> None:
        """Add rows `first` to `last` (exclusive) to the digest, in at most `bound` bytes."""
        size = len(self.data) // self.count
        row = self.data[first * size : last * size]
        if len(row) <= bound:
            digest.update(row)
            return
        end = bound // 4
        digest.update(row[:end])
        digest.update(row[-end:])
        middle = row[end:-end]
        # An odd stride, so that it does not see only the low bytes of each number.
        digest.update(middle[:: -(-len(middle) // (bound - 2 * end)) | 1].tobytes())


class _Tensor(View):
    @cached_property
    def data(self) -> memoryview:
        whole = self._leaf = self._leaf.detach().contiguous()
        size = whole.numel() * whole.element_size()
        return memoryview((ctypes.c_ubyte * size).from_address(whole.data_ptr())).cast("B")


class _Texts(View):
    """A list of strings or bytes: each is a row."""

    @cached_property
    def _texts(self) -> list[bytes]:
        return [text if isinstance(text, bytes) else str(text).encode() for text in self._leaf]

    @cached_property
    def ends(self) -> tuple[Any, ...]:
        return (*self._kind, self._texts[0][:_END], self._texts[-1][-_END:])

    def feed(self, digest: Any, first: int, last: int, bound: int) -> None:
        for text in self._texts[first:last]:
            digest.update(text[:bound])
            digest.update(b"\0")


def look(value: Any) -> list[View]:
    """A view of everything in `value` that lies in the host's memory; what lies elsewhere is left alone."""
    return [view for view in map(_view, _leaves(value)) if view is not None]


def digest(views: Sequence[View], indices: tuple[int, ...] | None = None) -> Batch:
    """The batch that consists of these; a sample is a row of those that are as long as the first."""
    if not views:
        return Batch(None, indices)
    size = views[0].count
    rows = _digests([view for view in views if view.count == size], size)
    return Batch(rows, indices, frozenset(one.storage for one in views), frozenset(one.ends for one in views))


def _view(leaf: Any) -> View | None:
    if isinstance(leaf, (list, tuple)):
        return _Texts(leaf, len(leaf), id(leaf), ("text", len(leaf)))
    if hasattr(leaf, "untyped_storage"):
        strided = str(leaf.layout) == "torch.strided" and not hasattr(leaf, "_local_tensor")
        if leaf.device.type != "cpu" or not strided or not leaf.dim() or not leaf.numel():
            return None
        storage = leaf.untyped_storage().data_ptr()
        return _Tensor(leaf, leaf.shape[0], storage, (leaf.dtype, tuple(leaf.shape))) if storage else None
    if hasattr(leaf, "__array_interface__") and leaf.ndim and leaf.size and leaf.flags.c_contiguous:
        return View(leaf, leaf.shape[0], leaf.ctypes.data, (leaf.dtype, leaf.shape))
    return None


def _digests(views: Sequence[View], size: int) -> tuple[str, ...]:
    chunk = -(-size // MAX_ROWS)
    bound = MAX_ROW_BYTES // len(views)
    digests = []
    for first in range(0, size, chunk):
        state = blake2b(digest_size=6)
        for view in views:
            view.feed(state, first, min(first + chunk, size), bound)
        digests.append(state.hexdigest())
    return tuple(digests)
