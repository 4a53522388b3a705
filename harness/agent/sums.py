"""What is kept of a step's samples beyond the bound of allowance.py: how many there are, and the sum of their numbers.

The number of a sample is its digest, or its index, mixed as in record/steps/samples.py (`in_any_order`), so that the
sums of a run and of its twin can be compared even if only one of them is beyond the bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .packed import ROW

_MASK = (1 << 64) - 1


class Sums(NamedTuple):
    """The samples of a rank in a step. The sums are modulo 2**64, so those of several ranks can be added."""

    in_samples: int
    samples: int  # the sum over the digests
    in_indices: int  # 0: the indices are not known
    indices: int  # the sum over the indices


def sums_of(samples: bytes, indices: Sequence[int] | None) -> Sums:
    """`samples`: ROW bytes for each digest."""
    digests = [int.from_bytes(samples[at : at + ROW], "big") for at in range(0, len(samples), ROW)]
    return Sums(len(digests), mixed_sum(digests), len(indices or ()), mixed_sum(indices or ()))


def mixed_sum(numbers: Iterable[int]) -> int:
    """The sum of the mixed numbers (splitmix64), modulo 2**64."""
    total = 0
    for number in numbers:
        x = (number + 0x9E3779B97F4A7C15) & _MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        total += x ^ x >> 31
    return total & _MASK
