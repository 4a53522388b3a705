"""Samples as numbers of 64 bits, so that the samples of many steps can be compared at once. Each digest is a number,
and each number is mixed before they are added (splitmix64: Steele et al., "Fast splittable pseudorandom number
generators", 2014). Two sums are equal by chance once in 2**64 times."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from torchaos.harness.agent.packed import ROW
from torchaos.harness.agent.sums import Sums, mixed_sum
from torchaos.harness.record.steps.execution import Execution

Array = npt.NDArray[Any]
_WORD = 8  # bytes
_DIGEST = 2 * ROW  # digits


def of_bytes(rows: Array) -> Array:
    """Turns the digests of the samples of each step (`rows`, ROW bytes for each digest) into an array with a row for
    each step and a column for each sample."""
    padded = np.zeros((len(rows), rows.shape[1] // ROW, _WORD), np.uint8)
    padded[..., _WORD - ROW :] = rows.reshape(len(rows), -1, ROW)
    return padded.view(">u8")[..., 0].astype(np.uint64)


def number_of(sample: Hashable) -> int:
    """The number of a sample: the same for a digest as text and as bytes. Samples that are no digests get numbers that
    no digest has."""
    if isinstance(sample, int):
        return sample & 2**64 - 1
    if isinstance(sample, str) and len(sample) == _DIGEST:
        try:
            return int(sample, 16)
        except ValueError:
            pass
    return xxhash.xxh3_64_intdigest(f"{type(sample).__name__} {sample}".encode(errors="surrogatepass")) | 1 << 63


def sums_of(execution: Execution) -> Sums:
    """The sums of the samples of a step, also if each of them is known."""
    if execution.sums is not None:
        return execution.sums
    seen, indices = execution.samples, execution.indices
    return Sums(len(seen), mixed_sum(map(number_of, seen)), len(indices), mixed_sum(map(number_of, indices)))


def as_indices(rows: Sequence[Sequence[Hashable]]) -> Array:
    """Rows of equal lengths of any indices, as in packed lines."""
    return np.array([[number_of(index) for index in row] for row in rows], np.uint64).view(np.int64)


def in_order(numbers: Array) -> Array:
    """A number for each row, which depends on the order of its samples."""
    place = np.arange(1, numbers.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _sum(_mixed(_mixed(numbers) + place))


def in_any_order(numbers: Array) -> Array:
    """A number for each row that does not depend on the order of the row's samples. The sum of the numbers of several
    rows is the number of a row with all their samples."""
    return _sum(_mixed(numbers))


def of_rows(rows: Sequence[Sequence[Hashable]]) -> tuple[Array, Array]:
    """Two digests of each row of samples: the first depends on the order of the samples (`in_order`), the second does
    not (`in_any_order`). The rows may have different lengths."""
    ordered, unordered = np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.uint64)
    lengths = np.array([len(row) for row in rows], np.int64)
    for length in set(lengths.tolist()) - {0}:
        at = np.flatnonzero(lengths == length)
        numbers = np.array([[number_of(sample) for sample in rows[place]] for place in at.tolist()], np.uint64)
        ordered[at], unordered[at] = in_order(numbers), in_any_order(numbers)
    return ordered, unordered


def _sum(mixed: Array) -> Array:
    found: Array = mixed.sum(axis=1, dtype=np.uint64)
    return found


def _mixed(x: Array) -> Array:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed
