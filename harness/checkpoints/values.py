"""Digests of the values of tensors, so that equal contents have equal digests whatever their layout on disk."""

from __future__ import annotations

import math

import numpy as np
from xxhash import xxh3_64

from .files import Files
from .layout import Shard, TensorEntry, Unreadable, torn

_BLOCK = 1 << 22
_AMPLE = 1 << 24  # bytes that a tensor may have beyond what its storage holds (an expanded one has few bytes on disk)
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def digest(files: Files, tensor: TensorEntry) -> str:
    """Of its type, its shape and its elements in row-major order. Raises Unreadable, OSError.

    A tensor whose parts do not follow one another in that order is put together in memory; all others are streamed.
    """
    summary = xxh3_64(f"{tensor.dtype} {tensor.shape}".encode())
    if tensor.inline is not None:
        summary.update(tensor.inline)
    elif _in_order(tensor):
        for shard in tensor.shards:
            extent = shard.extent
            for at in range(extent.offset, extent.end, _BLOCK):
                part = files.read(extent.file, at, min(_BLOCK, extent.end - at))
                if len(part) < min(_BLOCK, extent.end - at):
                    raise torn(f"{extent.file.rpartition('/')[2]} is cut off")
                summary.update(part)
    else:
        summary.update(_assemble(files, tensor).reshape(-1).view(np.uint8).data)
    return str(summary.hexdigest())


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
