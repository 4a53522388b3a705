"""Steps by number and rank, and the steps of two runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.record.steps.columns import is_none, lengths, widened
from torchaos.harness.record.steps.execution import Execution
from torchaos.harness.record.steps.executions import Executions

Array = npt.NDArray[Any]


class StepTable(Mapping[int, Mapping[int, Execution]]):
    """Steps by number, then by rank. Code that looks at all steps should use the columns of `executions`."""

    def __init__(self, executions: Executions, of: str = "global_step") -> None:
        """`executions`: in order of step and rank, each at most once. `of`: the column with the numbers of steps."""
        self.executions, self._of = executions, of
        steps = executions.column(of)
        self._starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1])[: len(steps)])
        self.numbers = steps[self._starts]
        self._ends = np.append(self._starts[1:], len(executions))

    @classmethod
    def of(cls, steps: Mapping[int, Mapping[int, Execution]]) -> StepTable:
        """A table of the given executions: by number, then by rank."""
        if isinstance(steps, StepTable):
            return steps
        flat = [execution for _step, by_rank in sorted(steps.items()) for _rank, execution in sorted(by_rank.items())]
        return cls(Executions.of(flat))

    def __getitem__(self, step: int) -> dict[int, Execution]:
        if step not in self._known:
            raise KeyError(step)
        place = int(np.searchsorted(self.numbers, step))
        return {execution.rank: execution for execution in self.executions[self._starts[place] : self._ends[place]]}

    def __contains__(self, step: object) -> bool:
        return step in self._known

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.tolist())

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def _known(self) -> set[int]:
        return set(self.numbers.tolist())

    @property
    def counts(self) -> Array:
        """For each step, the number of its ranks."""
        return self._ends - self._starts

    def of_each(self, values: Array) -> Array:
        """Spreads a value of each step over the executions of that step."""
        return np.repeat(values, self.counts)

    def by_key(self) -> Mapping[tuple[int, int], Execution]:
        """The executions by (step, rank)."""
        return _ByKey(self)

    def any(self, values: Array) -> Array:
        """For each step, whether the value is true for at least one rank."""
        return np.logical_or.reduceat(values, self._starts) if len(self) else np.zeros(0, bool)

    def most(self, values: Array) -> Array:
        """For each step, the largest value of its ranks."""
        return np.maximum.reduceat(values, self._starts) if len(self) else values[:0]

    def sums(self, values: Array) -> Array:
        return np.add.reduceat(values, self._starts) if len(self) else values[:0]

    def only(self, wanted: Array) -> StepTable:
        """The steps for which `wanted` is true."""
        return self if wanted.all() else StepTable(self.executions.at(self.of_each(wanted)), self._of)

    def at(self, steps: Collection[int]) -> StepTable:
        return self.only(np.isin(self.numbers, list(steps)))

    def up_to(self, last: int | None) -> StepTable:
        return self if last is None else self.only(self.numbers <= last)

    def without(self, steps: Collection[int]) -> StepTable:
        return self.only(~np.isin(self.numbers, list(steps))) if steps else self

    def without_ranks(self, ranks: Collection[int]) -> StepTable:
        if not ranks:
            return self
        return StepTable(self.executions.at(~np.isin(self.executions.rank, list(ranks))), self._of)


@dataclass(frozen=True)
class _ByKey(Mapping[tuple[int, int], Execution]):
    steps: StepTable

    def __getitem__(self, key: tuple[int, int]) -> Execution:
        return self.steps[key[0]][key[1]]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        own = self.steps.executions
        return zip(own.global_step.tolist(), own.rank.tolist(), strict=True)

    def __len__(self) -> int:
        return len(self.steps.executions)


@dataclass(frozen=True)
class Both:
    """The steps that two runs made on the same ranks, side by side, in order of step and rank."""

    ours: StepTable
    theirs: StepTable  # the same steps and ranks
    apart: Array  # the numbers of other common steps, which the runs made on different ranks

    @classmethod
    def of(cls, ours: StepTable, theirs: StepTable) -> Both:
        ours, theirs = (
            ours.only(np.isin(ours.numbers, theirs.numbers)),
            theirs.only(np.isin(theirs.numbers, ours.numbers)),
        )
        alike = ours.counts == theirs.counts
        mine, twins = ours.only(alike), theirs.only(alike)
        other = mine.any(mine.executions.rank != twins.executions.rank)
        apart = np.union1d(ours.numbers[~alike], mine.numbers[other])
        return cls(mine.only(~other), twins.only(~other), apart)

    def equal(self, name: str) -> Array:
        """For each step and rank: whether a column has the same bits in both runs."""
        return equal(self.ours.executions, self.theirs.executions, name)

    def beyond(self, name: str, allowed: Callable[[int], float], typical: float = 0.0) -> Array:
        """For each step and rank: whether some value may differ by more than `allowed` in that step. `typical`: as in
        `relatives`."""
        found = ~self.equal(name)
        if found.any():
            mine, twins = (values[found] for values in self._columns(name))
            limits = self.ours.of_each(np.array([allowed(step) for step in self.ours]))[found]
            far = (relatives(mine, twins, typical) > limits[:, None]).any(1)
            found[found] = far | (lengths(mine) != lengths(twins))
        return found

    def farthest(self, name: str, typical: float) -> Array:
        """For each step, the largest relative difference over all values of all ranks. Values that were not seen are
        left out. Infinite if a rank has another number of values in the two runs."""
        mine, twins = self._columns(name)
        far = np.where(is_none(mine) | is_none(twins), 0.0, relatives(mine, twins, typical)).max(1, initial=0.0)
        return self.ours.most(np.where(lengths(mine) == lengths(twins), far, np.inf))

    def _columns(self, name: str) -> tuple[Array, Array]:
        return _side_by_side(self.ours.executions, self.theirs.executions, name)


def equal(ours: Executions, theirs: Executions, name: str) -> Array:
    """For each pair of steps: whether a column has the same bits in both steps."""
    mine, twins = _side_by_side(ours, theirs, name)
    same = mine.view(np.int64) == twins.view(np.int64) if mine.dtype == float else mine == twins
    return np.asarray(same if same.ndim == 1 else same.all(1))


def _side_by_side(ours: Executions, theirs: Executions, name: str) -> tuple[Array, Array]:
    mine, twins = (np.ascontiguousarray(steps.column(name)) for steps in (ours, theirs))
    if mine.ndim == 1:
        return mine, twins
    width = max(mine.shape[1], twins.shape[1])
    return widened(mine, width), widened(twins, width)


def relatives(a: Array, b: Array, typical: float = 0.0) -> Array:
    """|a - b| / max(|a|, |b|, typical). 0 if both are equal or both NaN; infinite for other values that are not
    finite."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        far = np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), typical)
    far = np.where(np.isfinite(a) & np.isfinite(b), far, np.inf)
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, far)
