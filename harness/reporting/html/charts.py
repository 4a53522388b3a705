"""The charts of a run, with a table of figures for each: loss and learning rate by step, for the run and its twin, and
the GPUs over time. Of a long series, all points near important moments are drawn, and few elsewhere. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from torchaos.harness.analysis.comparison.agreement import differences, history_of
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.tolerance import relative
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import StepTable
from torchaos.harness.record.steps.columns import is_absent, is_none, lengths


def groups(
    times: Sequence[float], most: int, moments: Sequence[float], apart: Sequence[Hashable]
) -> Iterator[tuple[int, int]]:
    """Divides points, in order of `times`, into about `most` groups of neighbours. Yields the indices (first, last) of
    each group. The points nearest to `moments` are groups of their own. A group never has points with different values
    in `apart`."""
    if len(times) <= most:
        yield from ((number, number) for number in range(len(times)))
        return
    near = sorted(range(len(times)), key=lambda n: min((abs(times[n] - at) for at in moments), default=times[n]))
    alone = set(near[: most // 2])
    size = -(-(len(times) - len(alone)) // max(1, most - len(alone)))
    for (_what, single), some in groupby(range(len(times)), key=lambda n: (apart[n], n in alone)):
        numbers = list(some)
        step = 1 if single else size
        yield from ((numbers[at], numbers[min(at + step, len(numbers)) - 1]) for at in range(0, len(numbers), step))


def telling(values: Sequence[float | None], most: int, keep: Collection[int] = ()) -> list[int]:
    """The indices of about `most` values that show the shape of the series: the smallest and the largest of each group,
    the first, the last, and the indices in `keep`."""
    if len(values) <= most:
        return list(range(len(values)))
    size = -(-2 * len(values) // most)
    found = {0, len(values) - 1, *(place for place in keep if 0 <= place < len(values))}
    for begin in range(0, len(values), size):
        seen = [place for place in range(begin, min(begin + size, len(values))) if values[place] is not None]
        if seen:
            found.add(min(seen, key=lambda place: values[place] or 0.0))
            found.add(max(seen, key=lambda place: values[place] or 0.0))
    return sorted(found)


MOST_POINTS = 2_000  # about so many points of a curve are drawn
_MOST_FAULTS = 12  # the most marks of a curve
_ROUND = 9  # significant digits


def curves_of(run: Record, twins: Sequence[Record]) -> dict[str, Any]:
    """The data of the curves: `steps`, and for each name of a curve a list with a value or None for each step. `loss`,
    `lr`: of the run's final history, means over the ranks. `first_loss`: the loss of the first execution, for steps
    that were done again. `twin_loss`, `twin_lr`: of the twin. `apart`: the relative difference between `loss` and
    `twin_loss`."""
    history = history_of(run, twins)
    ours, theirs = history.by_step(), twins[0].history.by_step() if twins else StepTable.of({})
    again = StepTable(history.repeated()[0].last_of("global_step", "rank"))
    steps = sorted(ours.keys() | theirs.keys() | again.keys())
    of_steps = {
        "loss": _losses(ours), "twin_loss": _losses(theirs), "first_loss": _losses(again), "lr": _rates(ours),
        "twin_lr": _rates(theirs),
    }  # fmt: skip
    columns = {name: [values.get(step) for step in steps] for name, values in of_steps.items()}
    columns["apart"] = [_apart(a, b) for a, b in zip(columns["loss"], columns["twin_loss"], strict=True)]
    first = next(differences(ours, theirs, 0.0, 0.0), None)
    resumes = [attempt.base for attempt in history.attempts if attempt.number and attempt.base is not None]
    hit = _hit(run)
    shown = _shown(steps, columns, [*resumes, *(step for step, _ in hit), *([first.step] if first else [])])
    return {
        "steps": [steps[place] for place in shown],
        **{name: [_short(values[place]) for place in shown] for name, values in columns.items()},
        "resumes": resumes, "faults": hit,
        "first_difference": None if first is None else {
            "step": first.step, "rank": first.rank, "what": first.what, "run": _in_words(first.ours),
            "twin": _in_words(first.theirs), "relative": _short(first.relative),
        },
        "twin": bool(theirs), "compared": _compared(columns),
        "left_out": f"{len(shown)} of {len(steps)} steps are drawn: in each group of steps, the lowest and "
        "the highest loss"
        if len(shown) < len(steps) else "",
    }  # fmt: skip


def _compared(columns: Mapping[str, Sequence[float | None]]) -> int:
    """The number of steps in which the run and the twin both have a loss, or both have a learning rate."""
    pairs = (("loss", "twin_loss"), ("lr", "twin_lr"))
    both = (zip(columns[ours], columns[theirs], strict=True) for ours, theirs in pairs)
    return sum(any(None not in pair for pair in step) for step in zip(*both, strict=True))


def _hit(run: Record) -> list[tuple[int, str]]:
    """For each fault, a step and the fault's name: the step in which the fault landed or, if that is not known, the
    last step before the fault."""
    found: dict[tuple[int, str], None] = {}
    for landing in landings(run):
        hits = (event for event in run.of_fault(landing.fault, Kind.APPLYING) if event.mono_s >= landing.at_s)
        step = next((event.data["global_step"] for event in hits), None)
        step = run.history.highest_step(before_s=landing.at_s) if step is None else step
        if step is not None:
            found[step, landing.fault] = None
    return list(found)[:_MOST_FAULTS]


def _shown(steps: Sequence[int], columns: Mapping[str, Sequence[float | None]], moments: Sequence[int]) -> list[int]:
    """The indices of the steps to draw: enough to show the shape of a curve, and all steps around a moment."""
    if len(steps) <= MOST_POINTS:
        return list(range(len(steps)))
    near = {place for place, step in enumerate(steps) if any(abs(step - moment) <= 25 for moment in moments)}
    curves = [values for values in columns.values() if any(value is not None for value in values)]
    found = {place for values in curves for place in telling(values, MOST_POINTS // max(1, len(curves)), near)}
    return sorted(found)


def _losses(steps: StepTable) -> dict[int, float]:
    """The mean of all losses of a step."""
    losses = steps.executions.column("losses")
    seen = ~is_none(losses) & ~is_absent(losses)
    sums, counts = steps.sums(np.where(seen, losses, 0.0).sum(1)), steps.sums(seen.sum(1))
    some = counts > 0
    return dict(zip(steps.numbers[some].tolist(), (sums[some] / counts[some]).tolist(), strict=True))


def _rates(steps: StepTable) -> dict[int, float]:
    """The first rate of the first rank that has a rate in a step."""
    rates = steps.executions.column("lr")
    has = np.flatnonzero(lengths(rates) > 0)
    numbers, first = np.unique(steps.executions.global_step[has], return_index=True)
    return dict(zip(numbers.tolist(), rates[has[first], 0].tolist() if len(has) else [], strict=True))


def _apart(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else relative(ours, theirs)


def _in_words(value: float | None) -> str:
    return "not seen" if value is None else f"{value:.{_ROUND}g}"


def _short(value: float | None) -> float | None:
    """The value with nine digits, or None if a chart can't show it."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_ROUND}g}")


MOST_GPUS, MOST_GPU_POINTS = 16, 1_000  # the most GPUs of a chart; about the most points of a curve
# nvml.h, "nvmlClocksEventReasons"; idle, and clocks that somebody has set, are left out
_REASONS = {0x4: "power cap", 0x8: "hardware", 0x20: "heat (driver)", 0x40: "heat (hardware)", 0x80: "power brake"}
_LINKS = ("nvlink_bytes", "pcie_bytes")
_COUNTERS = {"ecc_corrected": "corrected", "ecc_uncorrected": "uncorrected", "nvlink_errors": "NVLink errors"}

Samples = Sequence[Event]
Points = list[tuple[float, float]]  # seconds since the run began, value


def gpus_of(run: Record) -> dict[str, Any]:
    """The charts ({title, times, lines: [label, values]}) and the table's rows. Without samples, both are empty."""
    start = run.events[0].mono_s if run.events else 0.0
    by_gpu: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in run.of_kind(Kind.GPU):
        by_gpu[event.data["node"], event.data["gpu"]].append(event)
    events = list(run.of_kind(Kind.GPU_EVENT))
    nodes = len({node for node, _ in by_gpu})
    names = {key: f"GPU {key[1]}" + (f" of node {key[0]}" if nodes > 1 else "") for key in sorted(by_gpu)}
    shown = list(names)[:MOST_GPUS]
    charts = [
        _chart(title, {names[key]: points(by_gpu[key], start) for key in shown})
        for title, points in (
            ("busy, % of the time", _level("busy_percent")), ("over NVLink and PCIe, GB/s", _rate),
            ("memory in use, GB", _level("memory_bytes", 1e9)), ("temperature, °C", _level("temperature_c")),
        )
    ]  # fmt: skip
    rows = [{"name": name, **_row(by_gpu[key], [e for e in events if _key(e) == key])} for key, name in names.items()]
    return {"charts": [chart for chart in charts if chart["lines"]], "rows": rows}


def _key(event: Event) -> tuple[int, int]:
    return event.data["node"], event.data["gpu"]


def _level(name: str, unit: float = 1.0) -> Callable[[Samples, float], Points]:
    return lambda samples, start: [
        (event.mono_s - start, event.data["values"][name] / unit) for event in samples if name in event.data["values"]
    ]


def _rate(samples: Samples, start: float) -> Points:
    """The rate of all links together, between each two samples. Left out are times in which a counter became smaller,
    because it was reset then."""
    found = []
    for one, next_ in pairwise(samples):
        before, after, took_s = one.data["values"], next_.data["values"], next_.mono_s - one.mono_s
        moved = [after[name] - before[name] for name in _LINKS if name in before and name in after]
        if moved and min(moved) >= 0 and took_s > 0:
            found.append((next_.mono_s - start, sum(moved) / took_s / 1e9))
    return found


def _chart(title: str, curves: Mapping[str, Points]) -> dict[str, Any]:
    """One column of times for all curves; a curve has None at times that only other curves have."""
    kept = {
        label: {
            round(points[n][0], 2): round(points[n][1], 3) for n in telling([y for _, y in points], MOST_GPU_POINTS)
        }
        for label, points in curves.items()
        if points
    }
    times = sorted({at for curve in kept.values() for at in curve})
    return {
        "title": title,
        "times": times,
        "lines": [[name, [one.get(at) for at in times]] for name, one in kept.items()],
    }


def _row(samples: Samples, events: Samples) -> dict[str, Any]:
    values = [event.data["values"] for event in samples]
    bits = {int(one["clock_reasons"]) for one in values if "clock_reasons" in one}
    grown = {words: _grown([one[name] for one in values if name in one]) for name, words in _COUNTERS.items()}
    return {
        "ranks": sorted({rank for event in samples for rank in event.data["ranks"]}),
        "busy": _most(values, "busy_percent", "{:.0f} %"), "memory": _most(values, "memory_bytes", "{:.1f} GB", 1e9),
        "temperature": _most(values, "temperature_c", "{:.0f} °C"), "power": _most(values, "power_w", "{:.0f} W"),
        "slowed": ", ".join(words for bit, words in _REASONS.items() if any(one & bit for one in bits)),
        "errors": ", ".join(f"{many:.0f} {words}" for words, many in grown.items() if many),
        "events": ", ".join(str(event.data["event"]) for event in events),
    }  # fmt: skip


def _grown(counts: Sequence[float]) -> float:
    """The growth of a counter over all samples. A fall, as after a reset of the GPU, counts as no growth."""
    return sum(max(0.0, after - before) for before, after in pairwise(counts))


def _most(values: Sequence[Mapping[str, float]], name: str, form: str, unit: float = 1.0) -> str:
    most = max((one[name] for one in values if name in one), default=None)
    return "" if most is None else form.format(most / unit)
