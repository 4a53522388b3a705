"""A sketch of a tensor: a few numbers. From two sketches, the difference of the tensors can be estimated when the
tensors are gone.

The first number is the sum of the elements' bits, read as signed integers of their size, modulo 2^64. It equals the
plain sum of the agent's check sum (agent/check_sums.py). For floating-point tensors, the norm and PROJECTIONS sums of
all elements follow. In each sum, every element has its own sign. For random signs, the mean square of the differences
of these sums is the square of the norm of the tensors' difference (Alon, Matias, Szegedy 1996: The space complexity of
approximating the frequency moments).

The sign of an element depends only on its place in row-major order. It is the product of a sign for its tile, a sign
for its row in the tile, and a sign for its column. So a matrix product computes the sums at the speed of reading
memory."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

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
