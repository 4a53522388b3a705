"""Digests of the samples of a batch. With them, samples can be compared between runs that spread them differently over
ranks and batches.

A row is one sample: the same index in every tensor of the batch that has an entry for each sample. A tensor with
another first dimension (a mask, the weights of classes, offsets into a packed sequence) is left out. The digest of a
row is blake2b (6 bytes) over at most 4 KiB of its bytes: the head, the tail, and some of the bytes between them."""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple, Sequence

from ...protocol.packed_lines import ROW

MAX_ROW_BYTES = 4096
MAX_ROWS = 512  # in a batch with more rows, a digest covers several rows
_LONG = 1 << 14  # bytes of a row from which on words are sampled
_SAMPLES = "__SAMPLES__"  # LitData's loader puts its own counters beside the samples, and removes them again
_MAX_LEAVES = 64
_COPIED = 1 << 18  # bytes up to which a copy is quicker than a view
_KEPT, _FEW = 1 << 14, 4  # bytes up to which a copy is kept with a batch, if the batch has few tensors
_MARK, _WORD = 4096, 8  # bytes of memory that identify a tensor, and bytes of a word


class KnownTensor(NamedTuple):
    """A tensor that can be recognized as long as it lives and is not changed in place."""

    id: int
    reference: weakref.ref[Any]
    version: int  # torch counts the changes in place

    def is_still(self, tensor: Any) -> bool:
        same = self.reference() is tensor
        return same and bool(tensor._version == self.version)


@dataclass(eq=False)
class Batch:
    """The facts that are kept about a batch. They keep no tensor alive."""

    samples: bytes | None  # a digest for each row, of ROW bytes; None: the batch could not be read
    indices: tuple[int, ...] | None = None
    kept: Sequence[int | bytes] = ()  # for each tensor of the batch: the mark, or a copy of the memory; see View.mark
    tensors: Sequence[KnownTensor] = ()
    used: bool = False  # the batch has been trained on

    @cached_property
    def marks(self) -> frozenset[int]:
        """The mark of each tensor of the batch, made from the memory at the time when the batch was received."""
        return frozenset([each if isinstance(each, int) else _mark(each) for each in self.kept])


def _leaves(value: Any) -> list[Any]:
    """The tensors, arrays, strings and bytes in nested containers, in order. At most _MAX_LEAVES; safe with cycles."""
    found, stack, left = [], [value], _MAX_LEAVES
    while stack and left:
        item = stack.pop()
        left -= 1
        if hasattr(item, "untyped_storage") or item is None:
            found.append(item)
        elif isinstance(item, (list, tuple)) and not (item and isinstance(item[0], (str, bytes))):
            stack.extend(item[_MAX_LEAVES::-1])
        elif hasattr(item, "keys") and hasattr(item, "values"):  # any mapping; a check of its type takes longer
            names = item.keys()  # a TensorDict refuses `in`
            stack.extend([item[_SAMPLES]] if _SAMPLES in names else list(item.values())[_MAX_LEAVES::-1])
        elif hasattr(item, "__dataclass_fields__") and not hasattr(item, "shape"):
            stack.extend(list(vars(item).values())[_MAX_LEAVES::-1])
        else:
            found.append(item)
    return found


class SampleView:
    """The bytes of one tensor, array or list of texts, row by row. They are read on demand."""

    def __init__(self, leaf: Any, count: int) -> None:
        self.count = count
        self._leaf = leaf  # keeps the memory alive
        self._data: bytes | memoryview | None = None

    def data(self) -> bytes | memoryview:
        if self._data is None:
            self._data = self._bytes()
        return self._data

    def mark(self) -> int:
        """A hash of the contents. Within this process, equal contents have equal hashes. (An address is no identity,
        because memory is reused.)"""
        return _mark(self.data())

    def to_keep(self) -> int | bytes:
        """The mark; or a short copy of the memory, from which the mark can be computed later if it is needed."""
        return self.mark()

    def is_mask(self) -> bool:
        """Whether the tensor looks like an attention mask: a square matrix."""
        shape = self._leaf.shape
        return len(shape) == 2 and shape[0] == shape[1]

    def width(self) -> int:
        """The number of numbers in a row."""
        return int(prod(self._leaf.shape[1:]))

    def feed(self, state: Any, first: int, last: int, bound: int) -> None:
        """Adds rows `first` to `last` (exclusive) to the digest `state`, with at most `bound` bytes."""
        data = self.data()
        size = len(data) // self.count
        row = data[first * size : last * size]
        state.update(row if len(row) <= bound else _sampled(row, bound))

    def _bytes(self) -> bytes | memoryview:
        return memoryview(self._leaf).cast("B")


class _Tensor(SampleView):
    def __init__(self, leaf: Any, count: int, storage: Any) -> None:
        super().__init__(leaf, count)
        self._address, self._size = storage.data_ptr(), storage.nbytes()

    def mark(self) -> int:
        """A digest of the whole storage, which is equal for all slices of one tensor (for example inputs and
        targets)."""
        if self._data is not None and len(self._data) == self._size:
            return _mark(self._data)
        return _mark(_memory(self._address, self._size))

    def to_keep(self) -> int | bytes:
        data = self._data
        return data if isinstance(data, bytes) and len(data) == self._size <= _KEPT else self.mark()

    def known(self) -> KnownTensor | None:
        """The tensor, to be recognized later. None for a tensor whose changes torch does not count."""
        leaf = self._leaf
        return None if leaf.is_inference() else KnownTensor(id(leaf), weakref.ref(leaf), leaf._version)

    def _bytes(self) -> bytes | memoryview:
        whole = self._leaf
        if not whole.is_contiguous():
            whole = self._leaf = whole.detach().contiguous()
        size = whole.numel() * whole.element_size()
        if size <= _COPIED:
            return ctypes.string_at(whole.data_ptr(), size)
        return _memory(whole.data_ptr(), size)


class _Texts(SampleView):
    """A list of strings or bytes; each of them is a row."""

    def mark(self) -> int:
        return hash(b"\0".join([self._text(place)[:_MARK] for place in range(min(self.count, _MAX_LEAVES))]))

    def is_mask(self) -> bool:
        return False

    def width(self) -> int:
        return len(self._text(0))

    def feed(self, state: Any, first: int, last: int, bound: int) -> None:
        for place in range(first, last):
            state.update(self._text(place)[:bound])
            state.update(b"\0")

    def _text(self, place: int) -> bytes:
        text = self._leaf[place]
        return text if isinstance(text, bytes) else str(text).encode()


def look(value: Any) -> list[SampleView]:
    """A view of each tensor, array and list of texts in `value` that is in host memory."""
    return [view for view in map(_view, _leaves(value)) if view is not None]


def digest(views: Sequence[SampleView], indices: tuple[int, ...] | None = None) -> Batch:
    """Digests the rows of a batch. `views`: a view of each of its tensors, arrays and lists of texts. `indices`: the
    dataset indices of its samples, if known."""
    if not views:
        return Batch(None, indices)
    size = views[0].count
    if any(view.count != size for view in views):
        size = _samples(views, indices)
    tensors = [known for view in views if isinstance(view, _Tensor) and (known := view.known()) is not None]
    samples = _digests([view for view in views if view.count == size], size)
    kept = [view.to_keep() if len(views) <= _FEW else view.mark() for view in views]
    return Batch(samples, indices, kept, tensors)


def _samples(views: Sequence[SampleView], indices: tuple[int, ...] | None) -> int:
    """How many samples a batch has if its views have different numbers of rows. It is the number of indices that were
    drawn, if a view has this many rows; otherwise the most frequent number of rows. If numbers are equally frequent, a
    view that is no mask decides; of several, the one with the widest rows."""
    sizes = Counter(view.count for view in views)
    if indices is not None and len(indices) in sizes:
        return len(indices)
    return max(views, key=lambda view: (sizes[view.count], not view.is_mask(), view.width())).count


def _view(leaf: Any) -> SampleView | None:
    if isinstance(leaf, (list, tuple)):
        return _Texts(leaf, len(leaf))
    if hasattr(leaf, "untyped_storage"):
        shape = leaf.shape
        if not shape or 0 in shape or not leaf.is_cpu or leaf.layout is not _torch().strided:
            return None
        if type(leaf) is not _torch().Tensor and hasattr(leaf, "_local_tensor"):  # a DTensor has no memory of its own
            return None
        try:
            storage = leaf.untyped_storage()
            return _Tensor(leaf, shape[0], storage) if storage.data_ptr() else None
        except RuntimeError:  # what torch traces or transforms has no memory
            return None
    if hasattr(leaf, "__array_interface__") and leaf.ndim and leaf.size and leaf.flags.c_contiguous:
        return SampleView(leaf, leaf.shape[0])
    return None


def _mark(data: bytes | memoryview) -> int:
    """A hash of short data, or of words taken at equal distances from longer data. The distance is odd, so that the
    words come from all columns of a table."""
    size = len(data)
    if size <= _MARK:
        return hash(bytes(data))
    words = memoryview(data)[: size - size % _WORD].cast("Q")
    return hash((size, words[:: -(-len(words) * _WORD // _MARK) | 1].tobytes(), bytes(data[-_WORD:])))


def _memory(address: int, size: int) -> memoryview:
    return memoryview(_array(size).from_address(address)).cast("B")


@lru_cache(maxsize=256)
def _array(size: int) -> Any:
    """A ctypes array type. Cached, because making it takes longer than digesting the array."""
    return ctypes.c_ubyte * size


def _sampled(row: bytes | memoryview, bound: int) -> bytes:
    """At most `bound` bytes of a longer row: the head, the tail, and bytes taken at an odd distance in between. With an
    even distance, only the low bytes of each number would be taken. Of a row that is far longer, words are taken
    instead: bytes that lie far apart take eight times as long to read."""
    end = bound // 4
    size, space = len(row) - 2 * end, bound - 2 * end
    if len(row) <= _LONG:
        middle = bytes(row)[end : -end : -(-size // space) | 1]
    else:
        words = memoryview(row)[end : end + size - size % _WORD].cast("Q")
        middle = words[:: -(-len(words) * _WORD // space) | 1].tobytes()
    return b"".join((row[:end], row[-end:], middle))


@cache
def _torch() -> Any:
    import torch

    return torch


def _digests(views: Sequence[SampleView], size: int) -> bytes:
    chunk = -(-size // MAX_ROWS)
    bound = MAX_ROW_BYTES // len(views)
    if chunk == 1 and not any(isinstance(view, _Texts) for view in views):
        columns = [view.data() for view in views]
        if max(map(len, columns)) <= bound * size:
            return _short_digests([bytes(column) for column in columns], size)
    digests = []
    for first in range(0, size, chunk):
        state = blake2b(digest_size=ROW)
        for view in views:
            view.feed(state, first, min(first + chunk, size), bound)
        digests.append(state.digest())
    return b"".join(digests)


def _short_digests(columns: Sequence[bytes], size: int) -> bytes:
    """The same as `_digests`, but faster, for the common case of short rows. It runs in every step."""
    rows = []
    for column in columns:
        width = len(column) // size
        rows.append([column[place : place + width] for place in range(0, size * width, width)])
    return b"".join([blake2b(b"".join(row), digest_size=ROW).digest() for row in zip(*rows, strict=True)])
