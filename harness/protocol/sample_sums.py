"""What is recorded of a step's samples when a rank has written as many bytes about samples as it may: how many samples
there are, and the sum of their numbers. Standard library only.

The number of a sample is its digest or its index, mixed as in record/steps/execution.py (`in_any_order`). So a run and
its twin can be compared even if only one of them has sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from .packed_lines import ROW

_MASK = (1 << 64) - 1
_LANE = 16  # bytes, enough for a product of two 64-bit numbers
_ALL = (1 << 8 * _LANE) - 1


class Sums(NamedTuple):
    """The samples of a rank in a step. The sums are modulo 2**64, so the sums of several ranks can be added."""

    in_samples: int
    samples: int  # the sum over the digests
    in_indices: int  # 0: the indices are not known
    indices: int  # the sum over the indices


def sums_of(samples: bytes, indices: Sequence[int] | None) -> Sums:
    """The sums for these samples. `samples`: the digests, ROW bytes each. `indices`: None if not known."""
    return Sums(len(samples) // ROW, _sum_of_digests(samples), len(indices or ()), mixed_sum(indices or ()))


def mixed_sum(numbers: Iterable[int]) -> int:
    """The sum of the mixed numbers (splitmix64), modulo 2**64."""
    found = [number & _MASK for number in numbers]
    return _mixed_sum(_lanes(len(found)).layout.pack(*found))


def _sum_of_digests(samples: bytes) -> int:
    lanes = bytearray(len(samples) // ROW * _LANE)
    for place in range(ROW):  # a digest begins with its highest byte, and a lane with its lowest
        lanes[ROW - 1 - place :: _LANE] = samples[place::ROW]
    return _mixed_sum(lanes)


class _Lanes(NamedTuple):
    """Constants for `count` lanes in one large integer. Each lane has a 64-bit number, and as many bits for its
    products, so that one operation of Python computes with all numbers at once."""

    layout: Struct
    gamma: int
    mask: int  # the lower half of each lane


@lru_cache(maxsize=64)
def _lanes(count: int) -> _Lanes:
    ones = int.from_bytes((1).to_bytes(_LANE, "little") * count, "little")
    return _Lanes(Struct(f"<{'Q8x' * count}"), ones * 0x9E3779B97F4A7C15, ones * _MASK)


def _mixed_sum(lanes: bytes | bytearray) -> int:
    _layout, gamma, mask = _lanes(len(lanes) // _LANE)
    x = int.from_bytes(lanes, "little") + gamma & mask
    x = ((x ^ x >> 30) & mask) * 0xBF58476D1CE4E5B9 & mask
    x = ((x ^ x >> 27) & mask) * 0x94D049BB133111EB & mask
    x = (x ^ x >> 31) & mask
    return x % _ALL & _MASK  # the sum of the lanes, because 2**128 is 1 modulo _ALL


OF_A_RUN = 768 << 20  # bytes that a run may write about samples, divided among the ranks


def of_each(ranks: int) -> int:
    """How many bytes each rank may write about samples. `ranks`: the number of ranks."""
    return OF_A_RUN // max(1, ranks)
