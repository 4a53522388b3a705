"""The GPUs over the time of the run, from the samples in the journal: curves, and a row of figures for each. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.record import Record
from torchaos.harness.telling.html.thinning import telling

MOST_GPUS, MOST_POINTS = 16, 1_000  # of a chart; of a curve, about
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
    """Over all links since the sample before. A counter that went back began again, so that time is left out."""
    found = []
    for one, next_ in pairwise(samples):
        before, after, took_s = one.data["values"], next_.data["values"], next_.mono_s - one.mono_s
        moved = [after[name] - before[name] for name in _LINKS if name in before and name in after]
        if moved and min(moved) >= 0 and took_s > 0:
            found.append((next_.mono_s - start, sum(moved) / took_s / 1e9))
    return found


def _chart(title: str, curves: Mapping[str, Points]) -> dict[str, Any]:
    """One column of times for all curves; a curve has None at the times of the others."""
    kept = {
        label: {round(points[n][0], 2): round(points[n][1], 3) for n in telling([y for _, y in points], MOST_POINTS)}
        for label, points in curves.items() if points
    }  # fmt: skip
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
    """How much a counter has grown in all, although it may begin again, as after a reset of the GPU."""
    return sum(max(0.0, after - before) for before, after in pairwise(counts))


def _most(values: Sequence[Mapping[str, float]], name: str, form: str, unit: float = 1.0) -> str:
    most = max((one[name] for one in values if name in one), default=None)
    return "" if most is None else form.format(most / unit)
