"""Steps of a run: as a selection in some order, as a table by number and rank, and side by side with those of another
run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from torchaos.harness.protocol.wire import Event
from torchaos.harness.record.steps.columns import Columns, is_none, lengths, widened
from torchaos.harness.record.steps.execution import Execution, with_values

Array = npt.NDArray[Any]

UNPLACED = -1  # in the column "global_step"
_TOGETHER = 1 << 19  # steps in a part, see `by_ranks`


class Executions(Sequence[Execution]):
    """Rows of columns, with the global number of each step. An Execution is made at each access, so code that reads all
    steps should read the columns."""

    def __init__(self, columns: Columns, rows: Array, global_step: Array, segment: Array) -> None:
        """`rows`: places in the columns. `global_step` and `segment`: for all rows of the columns."""
        self._columns, self._global_step, self._segment = columns, global_step, segment
        self._rows = rows.astype(np.int32 if len(columns) < 2**31 else np.int64, copy=False)

    @classmethod
    def of(cls, steps: Sequence[Execution]) -> Self:
        """These steps, in this order."""
        known = np.array(
            [UNPLACED if execution.global_step is None else execution.global_step for execution in steps], np.int64
        )
        segment = np.array([execution.segment for execution in steps], np.int64)
        return cls(Columns.of_executions(steps), np.arange(len(steps)), known, segment)

    @classmethod
    def all_of(cls, columns: Columns) -> Executions:
        """All steps of the columns, in order of attempt and time."""
        nothing, zero = (np.broadcast_to(np.int64(value), len(columns)) for value in (UNPLACED, 0))
        return cls(columns, _in_order(columns), nothing, zero)

    def once_each(self) -> Executions:
        """All steps, without global numbers yet. If two events report the same step of a rank, only the later one."""
        columns = self._columns
        nothing = np.full(len(columns), UNPLACED)
        segment = np.zeros(len(columns), columns["local_step"].dtype)
        return Executions(columns, _once_each(columns, self._rows), nothing, segment)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Execution: ...
    @overload
    def __getitem__(self, place: slice) -> Executions: ...
    def __getitem__(self, place: int | slice) -> Execution | Executions:
        if isinstance(place, slice):
            return self.at(place)
        row = int(self._rows[place])
        step = int(self._global_step[row])
        placed = {"global_step": None if step == UNPLACED else step, "segment": int(self._segment[row])}
        return with_values(self._columns.execution(row), placed)

    def __iter__(self) -> Iterator[Execution]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    # -- columns -------------------------------------------------------------------------------------------------

    def column(self, name: str) -> Array:
        """A value of each step, see columns.py. Also "global_step" (UNPLACED: not known) and "segment"."""
        whole: Array
        if name == "global_step":
            whole = self._global_step
        else:
            whole = self._segment if name == "segment" else self._columns[name]
        found: Array = whole[self._rows]
        return found

    @property
    def rank(self) -> Array:
        return self.column("rank")

    @property
    def attempt(self) -> Array:
        return self.column("attempt")

    @property
    def ranks(self) -> set[int]:
        """Each rank once."""
        return set(np.unique(self.rank).tolist())

    @property
    def attempts(self) -> set[int]:
        return set(np.unique(self.attempt).tolist())

    @property
    def local_step(self) -> Array:
        return self.column("local_step").astype(np.int64)  # so that any number may be added

    @property
    def mono_s(self) -> Array:
        return self.column("mono_s")

    @property
    def global_step(self) -> Array:
        return self.column("global_step")

    @property
    def loss_seen(self) -> Array:
        losses = self.column("losses")
        seen: Array = (lengths(losses) > 0) & ~is_none(losses).any(1)
        return seen

    @property
    def samples_seen(self) -> Array:
        many = self.column("in_samples")
        seen: Array = (many > 0) & (many == self.column("in_seen"))
        return seen

    @property
    def samples_known(self) -> Array:
        """For each step, whether all its samples were seen, even if only their sum was kept."""
        return self.samples_seen | self.column("summed")

    def indices(self) -> Iterator[tuple[Array, Array]]:
        """Global steps and, for each of them, the indices of its samples on one rank; see Columns.indices_of."""
        return ((self._global_step[rows], indices) for rows, indices in self._columns.indices_of(self._rows))

    def event(self, place: int) -> Event:
        """The event that reported the step at this place."""
        return self._columns.event(int(self._rows[place]))

    # -- parts ---------------------------------------------------------------------------------------------------

    def at(self, places: Array | slice) -> Executions:
        """The steps at these places, or those for which a mask is true."""
        return Executions(self._columns, self._rows[places], self._global_step, self._segment)

    def of_attempt(self, number: int | None) -> Executions:
        return self.at(self.attempt == number) if number is not None else self[:0]

    def of_source(self, name: str) -> Executions:
        names = self._columns.sources
        return self.at(self.column("source") == names.index(name)) if name in names else self[:0]

    def after(self, mono_s: float) -> Executions:
        """The executions that ended after `mono_s`."""
        return self.at(self.mono_s > mono_s)

    @property
    def in_order_of_time(self) -> Executions:
        return self.at(np.argsort(self.mono_s, kind="stable"))

    @property
    def placed(self) -> Executions:
        """The executions whose global step is known."""
        known = self.global_step != UNPLACED
        return self if known.all() else self.at(known)

    @property
    def with_state(self) -> Executions:
        """All steps that are objects. Only these can have check sums of parameters and moments, norms and sketches."""
        loose = self._columns.loose()
        return self if len(loose) == len(self._columns) else self.at(np.isin(self._rows, loose))

    def by_ranks(self) -> Iterator[Array]:
        """The places of these steps in parts, for code that needs several arrays for each step: it needs memory for one
        part at a time. All steps of a rank are in the same part."""
        rank = self.rank
        ranks = np.unique(rank)
        for part in np.array_split(ranks, max(1, min(len(ranks), len(rank) // _TOGETHER))):
            if len(part):
                yield np.flatnonzero((rank >= part[0]) & (rank <= part[-1]))

    def first_s(self) -> float | None:
        """When the first of these steps was over, CLOCK_MONOTONIC."""
        return float(self.mono_s.min()) if len(self) else None

    def last_s(self) -> float | None:
        return float(self.mono_s.max()) if len(self) else None

    def last_of(self, *names: str) -> Executions:
        """For each combination of values in the columns `names`, the last step that has it. Sorted by these values."""
        order = np.lexsort([self.column(name) for name in reversed(names)])
        last = np.zeros(len(order), bool)
        last[-1:] = True
        for name in names:
            sorted_ = self.column(name)[order]
            last[:-1] |= sorted_[1:] != sorted_[:-1]
        return self.at(order[last])

    def place(self, base: int | None, segment: int) -> None:
        """Sets the global numbers of these steps. `base`: the global steps before their segment, None if not known;
        `segment`: the steps of the attempt before their segment."""
        self._global_step[self._rows] = UNPLACED if base is None else base + self.local_step - segment
        self._segment[self._rows] = segment

    def joined(self, parts: Sequence[Executions]) -> Executions:
        """All these parts of the same columns, joined one after the other."""
        rows = np.concatenate([self._rows[:0], *(part._rows for part in parts)])
        return self if np.array_equal(rows, self._rows) else self._with(rows)

    def replaced(self, new: dict[int, Execution]) -> Executions:
        """A copy in which the steps at some places are replaced by `new`."""
        if not new:
            return self
        places, steps = np.array(list(new)), list(new.values())
        columns, rows = self._columns.with_others(steps), self._rows.copy()
        rows[places] = np.arange(len(self._columns), len(columns))
        made = Executions.of(steps)
        return Executions(
            columns, rows, np.concatenate([self._global_step, made._global_step]),
            np.concatenate([self._segment, made._segment]),
        )  # fmt: skip

    def _with(self, rows: Array) -> Executions:
        return Executions(self._columns, rows, self._global_step, self._segment)


def _ends(*columns: Array) -> Array:
    """For sorted columns: a mask that is true at the last row of each group of equal values."""
    last = np.ones(len(columns[0]), bool)
    if len(last):
        last[:-1] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return last


def _in_order(columns: Columns) -> Array:
    """The rows in order of attempt, then of time, source and number."""
    mono_s, attempt = columns["mono_s"], columns["attempt"]
    of_each = [np.flatnonzero(attempt == number) for number in np.unique(attempt)]
    rows = np.concatenate([np.zeros(0, np.int64), *(own[np.argsort(mono_s[own], kind="stable")] for own in of_each)])
    if ((np.diff(mono_s[rows]) == 0) & (np.diff(attempt[rows]) == 0)).any():
        return np.lexsort((columns["seq"], columns["source"], mono_s, attempt))
    return rows


def _is_unique(columns: Columns) -> bool:
    """Whether no two rows are the same step of the same rank."""
    whole, most = np.zeros(len(columns), np.int64), 1
    for name in ("attempt", "rank", "local_step"):
        size = int(columns[name].max(initial=0)) + 1
        most *= size
        if most >= 2**62:
            return False
        whole *= size
        whole += columns[name]
    whole.sort(kind="stable")
    return not (whole[1:] == whole[:-1]).any()


def _once_each(columns: Columns, rows: Array) -> Array:
    """These rows. If two are the same step of a rank, only the later one, at the place of the earlier one."""
    attempt = columns["attempt"]
    if _is_unique(columns):
        return rows
    keys = [columns[name][rows] for name in ("local_step", "rank")]
    order = np.lexsort((*keys, attempt[rows]))
    ends = _ends(attempt[rows][order], keys[1][order], keys[0][order])
    if ends.all():
        return rows
    first = order[np.concatenate([[True], ends[:-1]])]  # the later row takes the place of the first
    kept = np.argsort(first, kind="stable")
    return rows[order[ends][kept]]


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
        """Repeats the value of each step for all executions of that step."""
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
        """For each step and rank: whether the column has the same bits in both runs."""
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
