"""The steps that each rank executed in each attempt, from the agent's events or, without an agent, from the job's
log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torchaos.harness.agent.wire import Event, Kind

Key = tuple[int, int, int]  # attempt, rank, local step


@dataclass(frozen=True)
class Execution:
    """One step as one rank executed it. Values that were not seen are empty or None."""

    rank: int
    attempt: int
    local_step: int  # from 1 within the attempt
    mono_s: float  # when the step was over, CLOCK_MONOTONIC
    global_step: int | None = None  # from 1; None: can't be established
    losses: tuple[float | None, ...] = ()  # one per backward; None: never copied
    samples: tuple[str | None, ...] = ()  # a digest per row
    indices: tuple[int, ...] = ()
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
        None  # in the first step of a process and after a load: the check sum of the parameters before
    )
    moments: str | None = None  # the check sum of the optimizers' moments after the step, see agent/state.py
    restored_moments: str | None = None  # the same before it
    segment: int = 0  # how many local steps came before its segment

    @property
    def loss_seen(self) -> bool:
        return bool(self.losses) and None not in self.losses

    @property
    def samples_seen(self) -> bool:
        return bool(self.samples) and None not in self.samples


def from_agent(events: Iterable[Event]) -> list[Execution]:
    """The steps in order of events; losses that arrived late are merged in."""
    found: dict[Key, Execution] = {}
    late: dict[Key, tuple[float | None, ...]] = {}
    for event in events:
        if event.kind not in (Kind.STEP, Kind.LOSS) or event.step is None or event.rank is None:
            continue
        key = (event.attempt or 0, event.rank, event.step)
        if event.kind is Kind.STEP:
            found[key] = _of_step(event, key)
        else:
            late[key] = _merged(late.get(key, ()), _floats(event.data.get("losses")))
    for key in late.keys() & found.keys():
        found[key] = _with(found[key], {"losses": _merged(found[key].losses, late[key])})
    return list(found.values())


def from_log(events: Sequence[Event], attempts: Sequence[tuple[int, float]]) -> list[Execution]:
    """The steps that the job printed, for a job without an agent. The step number in a log line is taken as the global
    step. `attempts`: (number, start in seconds), in order of time."""
    found: dict[Key, Execution] = {}
    for line in events:
        if line.kind is not Kind.LOG_STEP or not isinstance(line.data.get("step"), int):
            continue
        started = [number for number, start_s in attempts if start_s <= line.mono_s]
        attempt = line.attempt if line.attempt is not None else (started[-1] if started else 0)
        step = line.data["step"]
        key = (attempt, line.rank or 0, step)
        loss, rate = _floats(line.data.get("loss")), _floats(line.data.get("lr"))
        lr = tuple(value for value in rate if value is not None)
        earlier = found.get(key)
        if earlier is None:
            found[key] = Execution(line.rank or 0, attempt, step, line.mono_s, step, losses=loss, lr=lr)
    return list(found.values())


def log_interval(executions: Iterable[Execution]) -> int:
    """The usual number of steps between two log lines."""
    by_attempt: dict[int, set[int]] = defaultdict(set)
    for one in executions:
        by_attempt[one.attempt].add(one.local_step)
    gaps = Counter(b - a for steps in by_attempt.values() for a, b in pairwise(sorted(steps)))
    return gaps.most_common(1)[0][0] if gaps else 1


def _of_step(event: Event, key: Key) -> Execution:
    attempt, rank, step = key
    data = event.data
    return Execution(
        rank, attempt, step, event.mono_s, None, _floats(data.get("losses")),
        tuple(_flat(data.get("samples"))), tuple(i for i in _flat(data.get("indices")) if isinstance(i, int)),
        tuple(rate for rate in _floats(data.get("lr")) if rate is not None),
        _number(data.get("opt_step")), _number(data.get("sched_step")),
        bool(data.get("skipped")), data.get("phases") or {}, data.get("parameters"), _number(data.get("norm")),
        _floats(data.get("sketch")), _floats(data.get("restored_sketch")), data.get("restored"), data.get("moments"),
        data.get("restored_moments"),
    )  # fmt: skip


def placed(one: Execution, base: int | None, segment: int) -> Execution:
    """The step with its global number. `base`: global steps before the first step of the segment; `segment`: local
    steps before the segment."""
    step = None if base is None else base + one.local_step - segment
    return _with(one, {"global_step": step, "segment": segment})


def counted_from(one: Execution, segment: int) -> Execution:
    """The step as if its attempt had begun after `segment` local steps."""
    return _with(one, {"local_step": one.local_step - segment})


def _with(one: Execution, values: Mapping[str, Any]) -> Execution:
    """The execution with some values replaced. Ten times faster than dataclasses.replace: a long run has a million
    executions."""
    found = object.__new__(Execution)
    found.__dict__.update(one.__dict__, **values)
    return found


def _merged(first: Sequence[float | None], late: Sequence[float | None]) -> tuple[float | None, ...]:
    size = max(len(first), len(late))
    padded = [*first, *[None] * (size - len(first))], [*late, *[None] * (size - len(late))]
    return tuple(old if new is None else new for old, new in zip(*padded, strict=True))


def _floats(value: Any) -> tuple[float | None, ...]:
    return tuple(None if one is None else float(one) for one in _flat(value))


def _flat(value: Any) -> list[Any]:
    """A nested list as a flat list; a single value as a list with one element; None as an empty list."""
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        if not any(isinstance(one, (list, tuple)) for one in value):
            return list(value)
        return [leaf for one in value for leaf in (_flat(one) if isinstance(one, (list, tuple)) else [one])]
    return [value]


def _number(value: Any) -> float | None:
    """The first number of a counter. The counter may have one number for each optimizer."""
    if value is None or isinstance(value, float):
        return value
    first = next((one for one in _flat(value) if isinstance(one, (int, float))), None)
    return None if first is None or isinstance(first, bool) else first
