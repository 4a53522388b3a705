"""What one rank did in one step of an attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchaos.harness.agent.sums import Sums

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
    parameters: str | None = None  # a check sum after the step, see agent/state.py
    norm: float | None = None  # of the gradient, before any clipping
    sketch: tuple[float | None, ...] = ()  # of the parameters after the step: their norm, then sums, see agent/state.py
    restored_sketch: tuple[float | None, ...] = ()
    restored: str | None = (
        None  # in the first step of a process and after a load: the check sum of the parameters before the step
    )
    moments: str | None = None  # the check sum of the optimizers' moments after the step, see agent/state.py
    restored_moments: str | None = None  # likewise, before the step
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
        data.get("restored_moments"),
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
