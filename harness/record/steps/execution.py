"""What one rank did in one step of an attempt.

Samples become numbers of 64 bits, so that the samples of many steps can be compared at once. Each digest is a number,
and each number is mixed before the numbers are added (splitmix64: Steele et al., "Fast splittable pseudorandom number
generators", 2014). Two sums are equal by chance once in 2**64 times."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from torchaos.harness.protocol.check_sums import Sums, mixed_sum
from torchaos.harness.protocol.packed_lines import ROW

_NESTED, _NUMBERS = frozenset({list, tuple}), frozenset({int, float})


@dataclass(frozen=True)
class Execution:
    """One step as one rank executed it. Values that were not seen are empty or None."""

    rank: int
    attempt: int
    local_step: int  # from 1 within the attempt
    mono_s: float  # when the step was over, CLOCK_MONOTONIC
    global_step: int | None = None  # from 1; None: not known
    losses: tuple[float | None, ...] = ()  # one per backward; None: never copied
    samples: tuple[str | None, ...] = ()  # a digest per row
    indices: tuple[int, ...] = ()
    sums: Sums | None = None  # only these are known about samples and indices, which are empty
    lr: tuple[float, ...] = ()  # one per parameter group
    opt_step: float | None = None
    sched_step: float | None = None
    skipped: bool = False
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds
    parameters: str | None = None  # a check sum after the step (agent/state/state_check_sums.py)
    norm: float | None = None  # of the gradient, before any clipping
    sketch: tuple[
        float | None, ...
    ] = ()  # of the parameters after the step: their norm, then sums, as in a sketch of agent/state/state_check_sums.py
    restored_sketch: tuple[float | None, ...] = ()
    restored: str | None = (
        None  # in the first step of a process and after a load: the check sum of the parameters before the step
    )
    moments: str | None = None  # a check sum of the optimizers' moments after the step
    restored_moments: str | None = None  # likewise, before the step
    dropped: int = 0  # how many times gradients were cleared without an optimizer step since the step before
    segment: int = 0  # how many local steps came before its segment

    @property
    def loss_seen(self) -> bool:
        return bool(self.losses) and None not in self.losses

    @property
    def samples_seen(self) -> bool:
        return bool(self.samples) and None not in self.samples


def of_payload(rank: int, attempt: int, step: int, mono_s: float, data: Mapping[str, Any]) -> Execution:
    """The step that an event with this payload reports. `step`: within the attempt; `mono_s`: when it was over."""
    return Execution(
        rank, attempt, step, mono_s, None, floats(data.get("losses")),
        tuple(_flat(data.get("samples"))), tuple(i for i in _flat(data.get("indices")) if isinstance(i, int)),
        Sums(*data["sums"]) if data.get("sums") else None,
        tuple(rate for rate in floats(data.get("lr")) if rate is not None),
        _number(data.get("opt_step")), _number(data.get("sched_step")),
        bool(data.get("skipped")), data.get("phases") or {}, data.get("parameters"), _number(data.get("norm")),
        floats(data.get("sketch")), floats(data.get("restored_sketch")), data.get("restored"), data.get("moments"),
        data.get("restored_moments"), data.get("dropped") or 0,
    )  # fmt: skip


def with_values(execution: Execution, values: Mapping[str, Any]) -> Execution:
    """Like dataclasses.replace, but ten times faster."""
    found = object.__new__(Execution)
    found.__dict__.update(execution.__dict__, **values)
    return found


def merged(first: Sequence[float | None], late: Sequence[float | None]) -> tuple[float | None, ...]:
    """The losses of a step, including losses that arrived late."""
    size = max(len(first), len(late))
    padded = [*first, *[None] * (size - len(first))], [*late, *[None] * (size - len(late))]
    return tuple(old if new is None else new for old, new in zip(*padded, strict=True))


def floats(value: Any) -> tuple[float | None, ...]:
    flat = _flat(value)
    return (
        tuple(None if number is None else float(number) for number in flat) if None in flat else tuple(map(float, flat))
    )


def _flat(value: Any) -> list[Any]:
    """A nested list as a flat list; a single value as a list with one element; None as an empty list."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        return [value]
    if _NESTED.isdisjoint(map(type, value)):
        return list(value)
    return [leaf for item in value for leaf in (_flat(item) if isinstance(item, (list, tuple)) else [item])]


def _number(value: Any) -> float | None:
    """The first number of a counter. The counter may have one number for each optimizer."""
    if value is None or type(value) in _NUMBERS:
        return value  # type: ignore[no-any-return]
    first = next((number for number in _flat(value) if isinstance(number, (int, float))), None)
    return None if first is None or isinstance(first, bool) else first


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
    """The number of a sample. A digest as text (hexadecimal digits) gets the number that `of_bytes` gives for its
    bytes. An int gets its lowest 64 bits. Any other sample gets a hash of at least 2**63, which is the number of no
    digest."""
    if isinstance(sample, int):
        return sample & 2**64 - 1
    if isinstance(sample, str) and len(sample) == _DIGEST:
        try:
            return int(sample, 16)
        except ValueError:
            pass
    return xxhash.xxh3_64_intdigest(f"{type(sample).__name__} {sample}".encode(errors="surrogatepass")) | 1 << 63


def sums_of(execution: Execution) -> Sums:
    """The sums of the samples of a step; computed if each sample is known."""
    if execution.sums is not None:
        return execution.sums
    seen, indices = execution.samples, execution.indices
    return Sums(len(seen), mixed_sum(map(number_of, seen)), len(indices), mixed_sum(map(number_of, indices)))


def as_indices(rows: Sequence[Sequence[Hashable]]) -> Array:
    """The indices of samples as numbers, as packed lines hold them. All rows have equal lengths."""
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
