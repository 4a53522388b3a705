"""All steps that the events of a run report, as columns. Packed steps of a process are one part; steps that are objects
are another."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.host.processes import give_back
from torchaos.harness.protocol import packed_lines
from torchaos.harness.protocol.wire import Event, Kind, Phase
from torchaos.harness.record.steps import execution
from torchaos.harness.record.steps.execution import Execution, floats, merged, of_payload, with_values
from torchaos.harness.record.steps.packed_blocks import Block, narrow

Array = npt.NDArray[Any]
Key = tuple[int, int]  # attempt, rank
Late = Mapping[int, dict[str, Any]]  # by step: fields of an Execution that a later event reported

# In `losses` and `lr`, two numbers that no computation gives: for a loss that was never copied, and for a place that a
# step does not have.
NONE, ABSENT = np.array([0x7FF8_70C7_A050_0001, 0x7FF8_70C7_A050_0002], np.uint64).view(float)
# The columns that are used often, and the names of the same values in blocks.
_KEPT = {"rank": "", "attempt": "", "local_step": "step", "mono_s": "mono_s", "losses": "losses", "lr": "lr",
         "samples": "samples"}  # fmt: skip
_MANY, _FEW = 1 << 18, 1 << 13  # steps; of a few, each column is kept
_SAVING = Phase.CHECKPOINT_WRITE.value


@dataclass(frozen=True)
class Loose:
    """Steps that are objects, not packed: steps from a job's log, steps with check sums of parameters, and steps of
    journals without packed lines."""

    steps: Sequence[Execution]
    sources: Sequence[str]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.steps)


class Columns:
    """The steps as columns, in any order. A column is made at its first use."""

    def __init__(self, parts: Iterable[Block | Loose]) -> None:
        self.parts = [part for part in parts if len(part)]
        self._starts = [0, *accumulate(len(part) for part in self.parts)]
        self._made: dict[str, Array] = {}

    @classmethod
    def of(cls, events: Iterable[Event], blocks: Iterable[Block] = ()) -> Columns:
        """The steps of these events and blocks; losses and states that were reported late are merged in."""
        late: dict[Key, Late] = defaultdict(lambda: defaultdict(dict))
        found: dict[Key, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
        for event in events:
            if event.kind in (Kind.STEP, Kind.LOSS) and event.step is not None and event.rank is not None:
                who = event.attempt or 0, event.rank
                if event.kind is Kind.STEP:
                    found[who][event.step].append(event)
                else:
                    _add_late(late[who][event.step], event.data)
        loose = [
            (_execution(execution, late), execution)
            for steps in found.values()
            for own in steps.values()
            for execution in own
        ]
        parts = [Loose([execution for execution, _ in loose], [e.source for _, e in loose], [e.seq for _, e in loose])]
        return cls([*parts, *(_with_late(block, late.get((block.attempt, block.rank))) for block in blocks)])

    @classmethod
    def of_executions(cls, steps: Sequence[Execution]) -> Columns:
        return cls([Loose(steps, [""] * len(steps), range(len(steps)))])

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, name: str) -> Array:
        """A column by its name; see _OF_BLOCK. A missing value is NaN, or -1."""
        if name in self._made:
            return self._made[name]
        parts = self.parts or [Loose((), (), ())]
        made = self._source() if name == "source" else _joined([_column(part, name) for part in parts])
        if name in _KEPT or len(self) < _FEW:
            self._made[name] = made
        if name in _KEPT:
            self._share(_KEPT[name], made)
            if len(self) >= _MANY:
                give_back()
        return made

    def _share(self, own: str, made: Array) -> None:
        """Lets blocks use the memory of a column that has the same values."""
        for at, part in zip(self._starts, self.parts, strict=False):
            if isinstance(part, Block) and own in part.own and "nones" not in part.own:
                same = made[at : at + len(part)]
                if same.shape == part.own[own].shape and same.dtype == part.own[own].dtype:
                    part.own[own] = same

    def _part_at(self, row: int) -> tuple[Block | Loose, int]:
        """The part that has this row, and the row's place in the part."""
        of = bisect_right(self._starts, row) - 1
        return self.parts[of], row - self._starts[of]

    def execution(self, row: int) -> Execution:
        """The step of this row, as an Execution without a global step."""
        part, place = self._part_at(row)
        if isinstance(part, Loose):
            return part.steps[place]
        own, data = part.own, part.payload(place)
        return of_payload(part.rank, part.attempt, int(own["step"][place]), float(own["mono_s"][place]), data)

    def event(self, row: int) -> Event:
        """The event that reported this step. Of a step that is an object: without payload and wall-clock time."""
        part, place = self._part_at(row)
        if isinstance(part, Block):
            return part.event(place)
        execution = part.steps[place]
        who = execution.rank, execution.attempt, execution.local_step
        return Event(Kind.STEP, part.sources[place], part.numbers[place], 0.0, execution.mono_s, *who)

    def indices_of(self, rows: Array) -> Iterator[tuple[Array, Array]]:
        """Yields rows and, for each row, the indices of its samples. Rows without indices are left out. Each yield has
        only a part of the rows, so that not all are in memory at once."""
        rows = np.sort(rows)
        cuts = np.searchsorted(rows, self._starts)
        for part, start, first, end in zip(self.parts, self._starts, cuts, cuts[1:], strict=False):
            own = rows[first:end]
            if isinstance(part, Loose):
                for row in own.tolist():
                    if indices := part.steps[row - start].indices:
                        yield np.array([row]), execution.as_indices([indices])
            elif len(own) and part.in_indices > 0 and not part.summed:
                yield own, part.again()["indices"][own - start].astype(np.int64)

    def loose(self) -> Array:
        """The rows of the steps that are objects."""
        rows = [np.arange(at, at + len(part)) for at, part in zip(self._starts, self.parts, strict=False)
                if isinstance(part, Loose)]  # fmt: skip
        return np.concatenate(rows) if rows else np.zeros(0, np.int64)

    def with_others(self, others: Sequence[Execution]) -> Columns:
        """Columns with further rows at the end."""
        return Columns([*self.parts, Loose(others, [""] * len(others), range(len(others)))])

    @property
    def sources(self) -> list[str]:
        """All sources, in order. The column "source" has places in this list."""
        names = (part.sources if isinstance(part, Loose) else [part.source] for part in self.parts)
        return sorted({name for own in names for name in own})

    def sources_of_ranks(self) -> dict[Key, set[str]]:
        """By attempt and rank: the sources that reported its steps."""
        found: dict[Key, set[str]] = defaultdict(set)
        for part in self.parts:
            if isinstance(part, Block):
                found[part.attempt, part.rank].add(part.source)
            else:
                for execution, source in zip(part.steps, part.sources, strict=True):
                    found[execution.attempt, execution.rank].add(source)
        return found

    def _source(self) -> Array:
        code = {name: place for place, name in enumerate(self.sources)}
        codes = [
            _same(len(part), code[part.source]) if isinstance(part, Block)
            else np.array([code[name] for name in part.sources], np.int64)
            for part in self.parts
        ]  # fmt: skip
        return np.concatenate([np.zeros(0, np.int64), *codes])


def _add_late(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    found["losses"] = merged(found.get("losses", ()), floats(data.get("losses")))
    if data.get("parameters") is not None:
        found.update(parameters=data["parameters"], moments=data.get("moments"), sketch=floats(data.get("sketch")))


def _execution(event: Event, late: Mapping[Key, Late]) -> Execution:
    attempt, rank, step = event.attempt or 0, event.rank or 0, event.step or 0
    execution = of_payload(rank, attempt, step, event.mono_s, event.data)
    values = late.get((attempt, rank), {}).get(step)
    if values is None:
        return execution
    return with_values(execution, {**values, "losses": merged(execution.losses, values["losses"])})


def _with_late(block: Block, late: Late | None) -> Block:
    """The block, with losses that arrived late put in the places that the event of their step left for them."""
    if not late or "nones" not in block.own:
        return block
    losses, nones = block.own["losses"].copy(), block.own["nones"].copy()
    for row in np.flatnonzero(nones).tolist():
        for place, value in enumerate(late.get(int(block.own["step"][row]), {}).get("losses", ())[: losses.shape[1]]):
            if value is not None:
                losses[row, place] = value
                nones[row] &= ~np.uint64(1 << place)
    return replace(block, own={**block.own, "losses": losses, "nones": nones})


def _column(part: Block | Loose, name: str) -> Array:
    if isinstance(part, Block):
        return _OF_BLOCK[name](part)
    return np.array(part.numbers, np.int64) if name == "seq" else _OF_LOOSE[name](part.steps)


def _joined(columns: Sequence[Array]) -> Array:
    if columns[0].ndim == 1:
        return np.concatenate(columns)
    width = max(column.shape[1] for column in columns)
    return np.concatenate([widened(column, width) for column in columns])


def _same(rows: int, value: int) -> Array:
    return np.broadcast_to(narrow(np.array(value)), rows)


def _counter(name: str) -> Callable[[Block], Array]:
    def column(block: Block) -> Array:
        values = block.whole(name)
        return np.where(values == packed_lines.NONE, np.nan, values)

    return column


def _losses(block: Block) -> Array:
    losses, nones = block.own["losses"], block.own.get("nones")
    if nones is not None:
        losses = losses.copy()
        for place in range(min(losses.shape[1], 64)):
            losses[nones >> np.uint64(place) & np.uint64(1) == 1, place] = NONE
    return losses


def _count(block: Block, each: int) -> Array:
    return np.full(len(block), max(each, 0), np.int32)


def _or_zero(name: str, kind: type = float) -> Callable[[Block], Array]:
    return lambda block: block.own[name] if name in block.own else np.zeros(len(block), kind)


def _indices(block: Block) -> Array:
    rows = block.again()["indices"] if block.in_indices > 0 and not block.summed else np.zeros((len(block), 0))
    return rows.astype(np.uint64)


def _indices_sum(block: Block) -> Array:
    return block.own["indices_sum"] if block.summed else execution.in_any_order(_indices(block))


_OF_BLOCK: Mapping[str, Callable[[Block], Array]] = {
    "rank": lambda block: _same(len(block), block.rank),
    "attempt": lambda block: _same(len(block), block.attempt),
    "local_step": lambda block: block.own["step"],
    "mono_s": lambda block: block.own["mono_s"],
    "seq": lambda block: block.whole("seq"),
    "dropped": lambda block: _same(len(block), 0),  # a step after dropped gradients is not packed
    "opt_step": _counter("opt_step"),
    "sched_step": _counter("sched_step"),
    "losses": _losses,
    "lr": lambda block: block.own["lr"],
    # Equal if the samples are, in this order. 0 if only the sum of the samples is known (`summed`).
    "samples": _or_zero("samples", np.uint64),
    "samples_sum": _or_zero("samples_sum", np.uint64),
    "indices": lambda block: execution.in_order(_indices(block)),
    "indices_sum": _indices_sum,
    "in_samples": lambda block: _count(block, block.in_samples),
    "in_seen": lambda block: _count(block, 0 if block.summed else block.in_samples),  # samples whose digest is known
    "summed": lambda block: np.full(len(block), block.summed),
    "in_indices": lambda block: _count(block, block.in_indices),
    "took_s": _or_zero("took_s"),  # in all phases
    "saving_s": _or_zero("saving_s"),
    "in_phases": lambda block: _count(block, len(block.phases)),
}  # fmt: skip


def _whole(read: Callable[[Execution], int]) -> Callable[[Sequence[Execution]], Array]:
    return lambda steps: np.array([read(step) for step in steps], np.int64)


def _real(read: Callable[[Execution], float | None]) -> Callable[[Sequence[Execution]], Array]:
    def column(steps: Sequence[Execution]) -> Array:
        return np.array([_float(read(execution)) for execution in steps])

    return column


def _float(value: float | None) -> float:
    try:
        return np.nan if value is None else float(value)
    except OverflowError:  # an integer of a damaged record
        return np.inf


def _rows(read: Callable[[Execution], Sequence[float | None]]) -> Callable[[Sequence[Execution]], Array]:
    def column(steps: Sequence[Execution]) -> Array:
        rows = [read(execution) for execution in steps]
        found = np.full((len(rows), max(map(len, rows), default=0)), ABSENT)
        for place, row in enumerate(rows):
            for number, value in enumerate(row):
                found[place, number] = NONE if value is None else value
        return found

    return column


_OF_LOOSE: Mapping[str, Callable[[Sequence[Execution]], Array]] = {
    "rank": _whole(lambda execution: execution.rank),
    "attempt": _whole(lambda execution: execution.attempt),
    "local_step": _whole(lambda execution: execution.local_step),
    "mono_s": _real(lambda execution: execution.mono_s),
    "dropped": _whole(lambda execution: execution.dropped),
    "opt_step": _real(lambda execution: execution.opt_step),
    "sched_step": _real(lambda execution: execution.sched_step),
    "losses": _rows(lambda execution: execution.losses),
    "lr": _rows(lambda execution: execution.lr),
    "samples": lambda steps: execution.of_rows([step.samples for step in steps])[0],
    "samples_sum": lambda steps: np.array([execution.sums_of(step).samples for step in steps], np.uint64),
    "indices": lambda steps: execution.of_rows([step.indices for step in steps])[0],
    "indices_sum": lambda steps: np.array([execution.sums_of(step).indices for step in steps], np.uint64),
    "in_samples": _whole(lambda execution: execution.sums.in_samples if execution.sums else len(execution.samples)),
    "summed": lambda steps: np.array([step.sums is not None for step in steps], bool),
    "in_seen": _whole(lambda execution: sum(sample is not None for sample in execution.samples)),
    "in_indices": _whole(lambda execution: execution.sums.in_indices if execution.sums else len(execution.indices)),
    "took_s": _real(lambda execution: sum(execution.phases.values())),
    "saving_s": _real(lambda execution: execution.phases.get(_SAVING, 0.0)),
    "in_phases": _whole(lambda execution: len(execution.phases)),
}


def widened(values: Array, width: int) -> Array:
    """`losses` or `lr`, with each row padded to `width` columns."""
    if values.shape[1] == width:
        return values
    return np.concatenate([values, np.full((len(values), width - values.shape[1]), ABSENT)], axis=1)


def is_none(values: Array) -> Array:
    """A mask: where `losses` has None."""
    return np.asarray(np.ascontiguousarray(values).view(np.uint64) == NONE.view(np.uint64))


def lengths(values: Array) -> Array:
    """The number of values in each row of `losses` or `lr`."""
    return np.asarray((~is_absent(values)).sum(1))


def is_absent(values: Array) -> Array:
    """A mask: where a row is padded, because it has fewer values."""
    return np.asarray(np.ascontiguousarray(values).view(np.uint64) == ABSENT.view(np.uint64))
