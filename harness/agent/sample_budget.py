"""How much a rank may write about samples, and what is kept of samples beyond that bound. A digest and an index of each
sample are most of the journal of a job with large batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from .packed_lines import ROW
from .wire import Kind

if TYPE_CHECKING:
    from .agent import Agent


# What is kept of a step's samples beyond the bound of sample_budget.py: how many there are, and the sum of their
# numbers.
#
# The number of a sample is its digest, or its index, mixed as in record/steps/execution.py (`in_any_order`), so that
# the sums of a run and of its twin can be compared even if only one of them is beyond the bound.

_MASK = (1 << 64) - 1
_LANE = 16  # bytes: a product of two numbers of 64 bits fits
_ALL = (1 << 8 * _LANE) - 1


class Sums(NamedTuple):
    """The samples of a rank in a step. The sums are modulo 2**64, so those of several ranks can be added."""

    in_samples: int
    samples: int  # the sum over the digests
    in_indices: int  # 0: the indices are not known
    indices: int  # the sum over the indices


def sums_of(samples: bytes, indices: Sequence[int] | None) -> Sums:
    """`samples`: ROW bytes for each digest."""
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
    """A number of lanes in one large integer. Each has a number of 64 bits, and as many bits for its products, so that
    one operation of Python does the same with all numbers."""

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
    return x % _ALL & _MASK  # the sum of the lanes: 2**128 is 1 modulo _ALL


# How much a rank may write about samples. A digest and an index of each sample are most of the journal of a job with
# large batches. Once a rank has written as much as its plan allows, it keeps only the sums of a step's samples, except
# in steps near a fault, a load or a save, which are kept in full.

OF_A_RUN = 768 << 20  # bytes, divided among the ranks
NEAR, AFTER_SAVE = 64, 8  # steps: around a fault, and after a start or a load; after a save
_INDEX = 4  # bytes
_REST = 100  # bytes of a step's line without samples
_TEXT = (
    "the samples take more than the {} KiB that are kept for each rank: from step {} of attempt {} on, only one sum "
    "for each rank and step is kept, except near faults, loads and saves"
)


def of_each(ranks: int) -> int:
    """What each of so many ranks may write about samples, in bytes."""
    return OF_A_RUN // max(1, ranks)


class Allowance:
    def __init__(self, agent: Agent) -> None:
        self._agent, self._until = agent, NEAR
        self._handled = agent.loads, agent.saves
        self._said = False
        allowed = agent.plan.sample_bytes
        self._left: float = float("inf") if allowed is None else allowed - _spent(agent)

    def sums(self, samples: bytes, indices: Sequence[int] | None) -> Sums | None:
        """What to write instead of these samples. None: they are kept in full. Must be called once for each step."""
        self._left -= len(samples) + _INDEX * len(indices or ())
        if self._left >= 0 or self._is_near():
            return None
        agent = self._agent
        if not self._said and agent.who.rank == 0:
            allowed = (agent.plan.sample_bytes or 0) // 1024
            agent.emit(Kind.NOTE, {"text": _TEXT.format(allowed, agent.steps_over, agent.who.attempt)})
        self._said = True
        return sums_of(samples, indices)

    def _is_near(self) -> bool:
        agent, (loads, saves) = self._agent, self._handled
        step = agent.steps_over
        if agent.loads != loads:
            self._until = step + NEAR - 1
        elif agent.saves != saves:
            self._until = max(self._until, step + AFTER_SAVE - 1)
        self._handled = agent.loads, agent.saves
        if step <= self._until:
            return True
        moments = [order.when.step for order in agent.plan.orders if order.when.step is not None]
        base = agent.orders.base
        return base is not None and any(abs(base + step - moment) <= NEAR for moment in moments)


def _spent(agent: Agent) -> int:
    """Bytes that earlier attempts of this rank wrote about samples on this node; an estimate, too low for small
    batches."""
    spent = 0
    if agent.who.attempt:
        for path in Path(agent.plan.events).glob(f"rank{agent.who.rank}-a*.jsonl"):
            text = path.read_bytes()
            spent += max(0, len(text) - _REST * text.count(b"\n"))
    return spent
