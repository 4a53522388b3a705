"""CRC-32, as in zip and gzip: joins the CRCs of two parts, and finds a single flipped bit.

A CRC is linear over GF(2): one flipped bit changes it by a value that depends only on the bit's distance from the end.
The polynomial is primitive, so these values differ for the first 2^32 - 1 distances. So the distance is the discrete
logarithm of the difference of two CRCs, which is found by baby steps and giant steps. Two CRCs are joined as in zlib's
crc32_combine by Mark Adler."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32  # nine times as fast as zlib's
except ImportError:
    from zlib import crc32

__all__ = ["combine", "crc32", "locate"]

_POLYNOMIAL, _ORDER = 0xEDB88320, 0xFFFFFFFF
_BIGGEST = 1 << 29  # bytes; up to here each bit has its own value
Matrix = tuple[int, ...]


def combine(first: int, second: int, length: int) -> int:
    """The CRC of two parts together, from their CRCs. `length`: of the second part, in bytes."""
    bits = 8 * length % _ORDER
    for place in range(32):
        if bits >> place & 1:
            first = _apply(_SQUARES[place], first)
    return first ^ second


def locate(difference: int, length: int) -> tuple[int, int] | None:
    """The (byte, bit) whose flip changes the CRC of `length` bytes by `difference`. None if no single flip changes it
    so."""
    if not difference or not 0 < length <= _BIGGEST:
        return None
    stride = 1 << max(4, (length.bit_length() + 1) // 2)
    near: dict[int, tuple[int, int]] = {}
    for bit in range(8):
        value = _TABLE[1 << bit]
        for distance in range(min(stride, length)):
            near.setdefault(value, (distance, bit))
            value = (value >> 8) ^ _TABLE[value & 0xFF]
    back = _power(-8 * stride % _ORDER)
    for base in range(0, length, stride):
        found = near.get(difference)
        if found and base + found[0] < length:
            return length - 1 - base - found[0], found[1]
        difference = _apply(back, difference)
    return None


def _table() -> Matrix:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _table()


def _apply(matrix: Matrix, vector: int) -> int:
    result = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


def _power(bits: int) -> Matrix:
    """The change of a CRC that `bits` more zero bits make, as a matrix over GF(2), stored by columns."""
    result: Matrix = tuple(1 << place for place in range(32))
    for place in range(32):
        if bits >> place & 1:
            square = _SQUARES[place]
            result = tuple(_apply(square, column) for column in result)
    return result


def _squares() -> tuple[Matrix, ...]:
    shift: Matrix = (_POLYNOMIAL, *(1 << place for place in range(31)))  # by one zero bit
    powers = [shift]
    for _ in range(31):
        powers.append(tuple(_apply(powers[-1], column) for column in powers[-1]))
    return tuple(powers)


_SQUARES = _squares()
