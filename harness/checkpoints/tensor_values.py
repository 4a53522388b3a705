"""The entries of nested containers under dotted names, and summaries of tensors: digests, which are equal for equal
contents in any layout on disk, and sketches, which show by how much two tensors differ.

A sketch is a few numbers of a tensor. From two sketches, the difference of their tensors can be estimated when the
tensors themselves are gone. The first number is the sum of the elements' bits, read as signed integers of their size,
modulo 2^64. It equals the plain sum of the agent's check sum (protocol/check_sums.py). For floating-point tensors, the
norm and PROJECTIONS sums of all elements follow. In each sum, every element has its own sign. For random signs, the
mean square of the differences of these sums is the square of the norm of the tensors' difference (Alon, Matias, Szegedy
1996: The space complexity of approximating the frequency moments).

The sign of an element depends only on its place in row-major order. It is the product of a sign for its tile, a sign
for its row in the tile, and a sign for its column. So a matrix product computes the sums at the speed of reading
memory.

Entries are tensors, and other values as text. Their depth and number are limited, because a container from a pickle may
contain itself, or the same list a million times."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from xxhash import xxh3_64, xxh3_64_hexdigest

from .files import Buffer, Files
from .layout import Shard, TensorEntry, Unreadable, limit, torn
from .pickle_globals import Array, Dtype, StorageRef, TensorRef
from .pickles import Global, Opaque

PROJECTIONS = 8
_ROWS, _COLUMNS, _TILES = 64, 1024, 4096  # size of a tile in elements; number of tiles after which their signs repeat
_TILE = _ROWS * _COLUMNS
_DRAW = np.random.default_rng(20240229)


def _signs(*shape: int) -> np.ndarray:
    return (2 * _DRAW.integers(0, 2, shape) - 1).astype(np.float64)


_OF_ROW, _OF_COLUMN, _OF_TILE = _signs(PROJECTIONS, _ROWS), _signs(PROJECTIONS, _COLUMNS), _signs(_TILES, PROJECTIONS)
_OF_ROW_32, _OF_COLUMN_32 = _OF_ROW.astype(np.float32), _OF_COLUMN.astype(np.float32)
# By type: the type in which numpy reads it, and how many numbers of that type an element has.
_PLAIN: dict[str, tuple[Any, int]] = {
    "float64": (np.float64, 1), "float32": (np.float32, 1), "float16": (np.float16, 1), "bfloat16": (np.uint16, 1),
    "complex64": (np.float32, 2), "complex128": (np.float64, 2), "complex32": (np.float16, 2),
    "float8_e4m3fn": (np.uint8, 1), "float8_e5m2": (np.uint8, 1), "float8_e4m3fnuz": (np.uint8, 1),
    "float8_e5m2fnuz": (np.uint8, 1),
}  # fmt: skip
_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class Sketch:
    """Computes a sketch from the bytes of one tensor, in row-major order, in parts of any size."""

    def __init__(self, dtype: str, item_size: int) -> None:
        self._dtype = dtype
        plain, parts = _PLAIN.get(dtype, (None, 1))
        self._plain = np.dtype(plain) if plain is not None else None
        self._integer = np.dtype(_INTEGERS.get(item_size // parts, np.int8))
        self._size = _TILE * (self._plain.itemsize if self._plain is not None else 8)  # bytes of a tile
        self._rest = bytearray()
        self._tile = 0
        self.bits = 0
        self._square = 0.0
        self._sums = np.zeros(PROJECTIONS)

    def update(self, data: memoryview) -> None:
        if self._rest:
            head = data[: self._size - len(self._rest)]
            self._rest += head
            data = data[len(head) :]
            if len(self._rest) == self._size:
                self._add(memoryview(self._rest))
                self._rest = bytearray()
        whole = len(data) - len(data) % self._size
        if whole:
            self._add(data[:whole])
        self._rest += data[whole:]

    def numbers(self) -> list[float]:
        """The sum of the bits; for finite floating-point elements, also the norm and the projections. Must be called
        only once."""
        if self._rest:
            self._add(memoryview(self._rest))
        numbers = [math.sqrt(self._square), *self._sums.tolist()] if self._plain is not None else []
        finite = all(map(math.isfinite, numbers))
        return [(self.bits + 2**63) % 2**64 - 2**63, *(float(f"{number:.9g}") for number in numbers if finite)]

    def _add(self, data: memoryview) -> None:
        """Adds data. `data`: whole tiles, or the last part."""
        even = len(data) - len(data) % self._integer.itemsize
        self.bits += int(np.frombuffer(data[:even], self._integer).sum(dtype=np.int64))
        if self._plain is None:
            return
        whole = len(data) - len(data) % self._plain.itemsize
        numbers = _as_numbers(self._dtype, np.frombuffer(data[:whole], self._plain))
        with np.errstate(all="ignore"):
            square, sums = _project(numbers, self._tile)
            if not math.isfinite(square) and numbers.dtype != np.float64:  # too large for float32
                square, sums = _project(numbers.astype(np.float64), self._tile)
            self._square += square
            self._sums += sums
        self._tile += len(numbers) // _TILE


def _project(numbers: np.ndarray, tile: int) -> tuple[float, np.ndarray]:
    if len(numbers) % _TILE:
        numbers = np.concatenate([numbers, np.zeros(-len(numbers) % _COLUMNS, numbers.dtype)])
    rows = min(len(numbers) // _COLUMNS, _ROWS)
    tiles = numbers.reshape(-1, rows, _COLUMNS)
    of_row, of_column = (_OF_ROW_32, _OF_COLUMN_32) if numbers.dtype == np.float32 else (_OF_ROW, _OF_COLUMN)
    by_tile = (np.matmul(of_row[:, :rows], tiles) * of_column).sum(-1, dtype=np.float64)
    of_tile = _OF_TILE[(tile + np.arange(len(tiles))) % _TILES]
    return float(np.dot(numbers, numbers)), np.einsum("tk,tk->k", by_tile, of_tile)


def _as_numbers(dtype: str, words: np.ndarray) -> np.ndarray:
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("float8"):
        return _float8(dtype).take(words)
    return words.astype(np.float32) if words.dtype == np.float16 else words


@lru_cache
def _float8(dtype: str) -> np.ndarray:
    """All values of a float8 type (OCP 8-bit Floating Point Specification 1.0, and variants without negative zero)."""
    mantissa = 3 if "e4m3" in dtype else 2
    bias = (1 << (6 - mantissa)) - (0 if "uz" in dtype else 1)
    values = []
    for word in range(256):
        exponent, rest = (word & 0x7F) >> mantissa, word & ((1 << mantissa) - 1)
        value = math.ldexp(rest + ((1 << mantissa) if exponent else 0), max(exponent, 1) - bias - mantissa)
        special = (word & 0x7F) == 0x7F if mantissa == 3 else exponent == 31
        if "uz" in dtype:
            special = word == 0x80
        values.append(math.nan if special else -value if word & 0x80 else value)
    return np.array(values, np.float32)


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
    """The summary of one tensor; each byte is read once. Raises Unreadable if the layout of the tensor is wrong,
    OSError if a file can't be read.

    A tensor whose parts are stored in another order is put together in memory. Other tensors are streamed."""
    digest, sketch = xxh3_64(f"{tensor.dtype} {tensor.shape}".encode()), Sketch(tensor.dtype, tensor.item_size)
    for part in _parts(files, tensor, buffer or Buffer(_BLOCK)):
        digest.update(part)
        sketch.update(part)
    return Summary(str(digest.hexdigest()), sketch.numbers())


def kind_of(tensor: TensorEntry) -> str:
    """The tensor's type and shape as text, in the form that agent/state/tensor_names.py gives to a parameter's."""
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


_DEPTH, _ENTRIES, _LONG = 50, 3_000_000, 16
# A key that Python's id() made, such as that of a parameter: another in each process, so that its place is its name.
_AN_ADDRESS = 1 << 40
_SHORT = 1000  # characters; paths stay readable, so that the run's own folder can be recognised in them
AddTensor = Callable[[str, TensorRef], None]


class Contents:
    """Collects the entries of one checkpoint."""

    def __init__(self, values: dict[str, str], tensors: dict[str, TensorEntry], opaque: list[str]) -> None:
        self._values, self._tensors, self._opaque = values, tensors, opaque
        self._left = _ENTRIES

    def add(self, name: str, value: Any, tensor: AddTensor) -> None:
        """Adds a value and everything nested in it. `tensor` is called for each tensor that refers to a storage. Raises
        Unreadable if the value is nested too deeply or has too many entries."""
        stack = [(name, value, 0)]
        while stack:
            name, value, depth = stack.pop()
            self._left -= 1
            if self._left < 0 or depth > _DEPTH:
                raise limit("it is nested too deeply, or has millions of entries")
            if isinstance(value, TensorRef):
                tensor(name, value)
            elif isinstance(value, Array):
                self._add_array(name, value, stack, depth)
            else:
                inside = list(self._inside(name, value))
                stack.extend((inner, item, depth + 1) for inner, item in reversed(inside))

    def _inside(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """The entries inside a value, which must be added next. A value without entries is recorded here."""
        if isinstance(value, dict):
            by_address = bool(value) and all(isinstance(key, int) and key >= _AN_ADDRESS for key in value)
            for place, (key, item) in enumerate(value.items()):
                yield under(name, f"id {place}" if by_address else key), item
        elif isinstance(value, (list, tuple)):
            if len(value) > _LONG and all(isinstance(item, (int, float)) for item in value):
                self._values[name] = f"{len(value)} numbers, digest {_digest(repr(value))}"
            else:
                yield from ((under(name, place), item) for place, item in enumerate(value))
        elif isinstance(value, Opaque):
            yield from self._inside_opaque(name, value)
        else:
            self._values[name] = text_of(value)

    def _inside_opaque(self, name: str, value: Opaque) -> Iterator[tuple[str, Any]]:
        if value.what.full not in ("argparse.Namespace", "types.SimpleNamespace"):
            self._opaque.append(name)
            self._values[under(name, "class")] = value.what.full
        for place, item in enumerate(value.args):
            if not isinstance(item, Global):
                yield under(name, place), item
        states = value.state if isinstance(value.state, tuple) and value.state[:1] == (None,) else (value.state,)
        for state in states:
            if isinstance(state, dict):
                yield name, state
            elif state is not None:
                yield under(name, "state"), state
        if value.items:
            yield name, value.items
        yield from ((under(name, key), item) for key, item in value.pairs)

    def _add_array(self, name: str, value: Array, stack: list[tuple[str, Any, int]], depth: int) -> None:
        if value.items:
            stack.append((name, value.items, depth + 1))
        else:
            self._tensors[name] = TensorEntry(name, value.dtype, value.shape, (), value.data)


def under(name: str, key: Any) -> str:
    inner = key if isinstance(key, str) else text_of(key)
    return f"{name}.{inner}" if name and not name.endswith(":") else f"{name}{inner}"


def text_of(value: Any) -> str:
    """The value as text. A long text is replaced by its type and a digest."""
    if isinstance(value, Global):
        return value.full
    if isinstance(value, TensorRef):
        return f"tensor {value.storage.key}"
    if isinstance(value, (StorageRef, Dtype)):
        return f"{type(value).__name__} {value.dtype if isinstance(value, StorageRef) else value.name}"
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"int, digest {_digest(hex(value))}"
    if isinstance(value, (tuple, set, frozenset)):
        plain = [item if isinstance(item, (str, int, float, bytes)) else type(item).__name__ for item in value]
        value = plain if isinstance(value, tuple) else sorted(plain, key=repr)  # a set has no order
    elif isinstance(value, Opaque):
        return f"<{value.what.full}>"
    text = repr(value)
    return text if len(text) <= _SHORT else f"{type(value).__name__}, digest {_digest(text)}"


def _digest(text: str) -> str:
    return str(xxh3_64_hexdigest(text.encode(errors="replace")))
