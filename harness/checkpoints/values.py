"""Summaries of tensors: digests, which are equal for equal contents in any layout on disk, and sketches, which show by
how much two tensors differ."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64

from .buffer import Buffer
from .files import Files
from .layout import Shard, TensorEntry, Unreadable, torn
from .sketch import Sketch

_BLOCK = 1 << 20  # bytes; a multiple of a Sketch's tile
_AMPLE = 1 << 24  # bytes by which a tensor may exceed four times its bytes on disk (expanded tensors have few)
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True)
class Summary:
    """A summary of one tensor. `digest`: of type, shape and elements in row-major order. `sketch`: the numbers of a
    Sketch."""

    digest: str
    sketch: list[float]


def summary(files: Files, tensor: TensorEntry, buffer: Buffer | None = None) -> Summary:
    """The summary of one tensor; each byte is read once. Raises Unreadable or OSError.

    A tensor whose parts are stored in another order is put together in memory. Other tensors are streamed."""
    digest, sketch = xxh3_64(f"{tensor.dtype} {tensor.shape}".encode()), Sketch(tensor.dtype, tensor.item_size)
    for part in _parts(files, tensor, buffer or Buffer(_BLOCK)):
        digest.update(part)
        sketch.update(part)
    return Summary(str(digest.hexdigest()), sketch.numbers())


def kind_of(tensor: TensorEntry) -> str:
    """The tensor's type and shape as text, in the same form as agent/kept.py writes for a parameter."""
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape))}"


def summaries(
    files: Files, tensors: Mapping[str, TensorEntry], go_on: Callable[[], None]
) -> Iterator[tuple[str, Summary | Exception]]:
    """The summaries of all tensors, by name and in order. If a tensor can't be read, its error. A few threads compute
    them, because hashes and sums release the GIL. `go_on` is called before each tensor, and may raise."""
    own = threading.local()

    def work(tensor: TensorEntry) -> Summary | Exception:
        try:
            go_on()
            own.buffer = getattr(own, "buffer", None) or Buffer(_BLOCK)
            return summary(files, tensor, own.buffer)
        except (Unreadable, OSError) as error:
            return error

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        try:
            yield from zip(tensors, pool.map(work, tensors.values()), strict=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _parts(files: Files, tensor: TensorEntry, buffer: Buffer) -> Iterator[memoryview]:
    """The tensor's bytes in parts. A part is valid until the next one is requested."""
    if tensor.inline is not None:
        yield memoryview(tensor.inline)
    elif _in_order(tensor):
        for shard in tensor.shards:
            extent = shard.extent
            for at in range(extent.offset, extent.end, buffer.size):
                part = buffer.part(at, min(buffer.size, extent.end - at), extent.offset)
                if files.read_into(extent.file, at, part) < len(part):
                    raise torn(f"{extent.file.rpartition('/')[2]} is cut off")
                yield part
    else:
        yield _assemble(files, tensor).reshape(-1).view(np.uint8).data


def _in_order(tensor: TensorEntry) -> bool:
    rows = all(shard.strides is None and shard.sizes[1:] == tensor.shape[1:] for shard in tensor.shards)
    return rows and sum(shard.extent.length for shard in tensor.shards) == tensor.bytes


def _assemble(files: Files, tensor: TensorEntry) -> np.ndarray:
    stored = sum(shard.extent.length for shard in tensor.shards)
    if tensor.shards and tensor.bytes > 4 * stored + _AMPLE:
        parts = [repr((shard.offsets, shard.sizes, shard.strides)).encode() for shard in tensor.shards]
        data = b"".join(
            files.read(shard.extent.file, shard.extent.offset, shard.extent.length) for shard in tensor.shards
        )
        return np.frombuffer(b"".join(parts) + data, np.uint8)
    word = _WORDS[tensor.item_size]
    if not tensor.shards:
        return np.zeros(0, np.uint8)  # a tensor on the meta device has no contents
    whole: np.ndarray = np.zeros(tensor.shape, word)
    for shard in tensor.shards:
        where = tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.sizes, strict=True))
        whole[where] = _box(files, shard, np.dtype(word))
    return np.ascontiguousarray(whole)


def _box(files: Files, shard: Shard, word: np.dtype) -> np.ndarray:
    extent = shard.extent
    data = files.read(extent.file, extent.offset, extent.length)
    if len(data) < extent.length:
        raise torn(f"{extent.file.rpartition('/')[2]} is cut off")
    numbers = np.frombuffer(data, word)
    if shard.strides is None:
        return numbers.reshape(shard.sizes)
    last = sum((size - 1) * step for size, step in zip(shard.sizes, shard.strides, strict=True))
    if math.prod(shard.sizes) and last >= len(numbers):
        raise Unreadable("it reaches beyond its storage")
    steps = [step * word.itemsize for step in shard.strides]
    return np.lib.stride_tricks.as_strided(numbers, shard.sizes, steps, writeable=False)
