"""Runs as pictures: one run as a small card, and many runs on one page."""

from __future__ import annotations

import os
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from torchaos.harness.host.disk import write_atomically
from torchaos.harness.record.record import Record, without_steps
from torchaos.harness.record.result import Result, Verdict, verdicts_in_words
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.compare_runs import Night
from torchaos.harness.reporting.html.charts import curves_of
from torchaos.harness.reporting.html.page import clean, render
from torchaos.harness.reporting.terminal.console import why
from torchaos.harness.reporting.terminal.headline import Gauge, gauges, happened
from torchaos.harness.reporting.trend_store import Kept

_WIDTH, _MARGIN, _LINE = 760, 28, 22
_CHART = 150  # height
_COLOURS = {
    Verdict.PASSED: "#1a7f37", Verdict.FAILED: "#c62828", Verdict.INCONCLUSIVE: "#9a6700", Verdict.ERROR: "#c62828",
}  # fmt: skip
_STATES = {"passed": "#1a7f37", "failed": "#c62828", "unknown": "#6a7280", "unbounded": "#1b1f24"}
_INK, _DIM, _GRID, _RUN, _TWIN, _FAULT = "#1b1f24", "#5b6370", "#e3e5e8", "#1f6feb", "#9cc2f2", "#b26a00"


def card(result: Result, run: Record, twins: Sequence[Record]) -> str:
    """The picture of a run, as SVG."""
    run = run if run.plan.job.replicas == 1 else without_steps(run)
    parts, y = [*_title(result)], 66
    told = why(result)
    reason = ". ".join(filter(None, (told.lead, told.failures))) + "."
    for text, colour in (*((text, _INK) for text in happened(run, result)), (reason, _DIM)):
        for line in textwrap.wrap(clean(text), 92)[:3]:
            parts.append(_text(_MARGIN, y, line, 15, colour))
            y += _LINE
    figures = gauges(result)
    if figures:
        parts += [part for number, one in enumerate(figures) for part in _gauge(one, number, y)]
        y += 84
    curves = curves_of(run, twins)
    if sum(value is not None for value in curves["loss"]) > 1:
        parts += _chart(curves, y)
        y += _CHART + 34
    height = y + 6
    label = escape(clean(f"{result.scenario}: {result.verdict.value}"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img" '
        f'aria-label="{label}"><rect width="{_WIDTH}" height="{height}" rx="10" fill="#fff" stroke="{_GRID}"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _title(result: Result) -> Iterator[str]:
    word = result.verdict.value.upper()
    width = 11 * len(word) + 16
    yield f'<rect x="{_MARGIN}" y="18" width="{width}" height="26" rx="4" fill="{_COLOURS[result.verdict]}"/>'
    yield _text(_MARGIN + width / 2, 36, word, 14, "#fff", anchor="middle", bold=True)
    yield _text(_MARGIN + width + 12, 37, clean(result.scenario)[:60], 18, _INK, bold=True)


def _gauge(gauge: Gauge, number: int, y: float) -> Iterator[str]:
    width = (_WIDTH - 2 * _MARGIN - 24) / 3
    x = _MARGIN + number * (width + 12)
    yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="70" rx="6" fill="#fff" stroke="{_GRID}"/>'
    yield _text(x + 10, y + 18, gauge.name, 12, _DIM)
    yield _text(x + 10, y + 42, gauge.value, 20, _STATES[gauge.state], bold=True)
    yield _text(x + width - 10, y + 42, gauge.bound, 12, _DIM, anchor="end")
    if gauge.share is not None:
        yield f'<rect x="{x + 10:.1f}" y="{y + 54}" width="{width - 20:.1f}" height="6" fill="{_GRID}"/>'
        long = (width - 20) * max(gauge.share, 0.01 if gauge.share else 0.0)
        yield f'<rect x="{x + 10:.1f}" y="{y + 54}" width="{long:.1f}" height="6" fill="{_STATES[gauge.state]}"/>'


def _chart(curves: Mapping[str, Any], top: float) -> Iterator[str]:
    steps: list[int] = curves["steps"]
    seen: list[float] = [value for name in ("loss", "twin_loss") for value in curves[name] if value is not None]
    low, high = min(seen), max(seen)
    wide, span = _WIDTH - 2 * _MARGIN, (high - low) or 1.0
    length = (steps[-1] - steps[0]) or 1

    def x(step: float) -> float:
        return _MARGIN + wide * (step - steps[0]) / length

    def y(value: float) -> float:
        return top + 14 + (_CHART - 14) * (high - value) / span

    yield f'<rect x="{_MARGIN}" y="{top + 8}" width="{wide}" height="{_CHART}" fill="none" stroke="{_GRID}"/>'
    for step, name in curves["faults"][:3]:
        yield _mark(x(step), top, f"{clean(name)}: step {step}", _FAULT, 0)
    if first := curves["first_difference"]:
        yield _mark(x(first["step"]), top, f"first difference: step {first['step']}", _COLOURS[Verdict.FAILED], 1)
    for name, colour, thick in (("twin_loss", _TWIN, 4), ("loss", _RUN, 1.5)):
        for line in _lines(steps, curves[name]):
            points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in line)
            yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{thick}"/>'
    yield _text(_MARGIN, top + _CHART + 26, f"loss, steps {steps[0]} to {steps[-1]}", 12, _DIM)
    if any(value is not None for value in curves["twin_loss"]):
        yield _text(_WIDTH - _MARGIN, top + _CHART + 26, "pale: the run without faults", 12, _DIM, anchor="end")


def _lines(steps: Sequence[int], values: Sequence[float | None]) -> Iterator[list[tuple[int, float]]]:
    """The parts of a curve without a gap."""
    line: list[tuple[int, float]] = []
    for step, value in zip(steps, values, strict=True):
        if value is None:
            if line:
                yield line
            line = []
        else:
            line.append((step, value))
    if line:
        yield line


def _mark(x: float, top: float, words: str, colour: str, row: int) -> str:
    left = x > _WIDTH * 0.6
    text = _text(x - 5 if left else x + 5, top + 21 + 15 * row, words, 12, colour, anchor="end" if left else "start")
    return f'<rect x="{x:.1f}" y="{top + 8}" width="1.5" height="{_CHART}" fill="{colour}"/>{text}'


def _text(
    x: float, y: float, words: str, size: int, colour: str, anchor: str = "start", bold: bool = False
) -> str:  # fmt: skip
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


# Many runs on one page: a table with a filter, a chart of the recovery times for each scenario, and a chart of the
# share of training time for each game day.

MOST_TRENDS, MOST_POINTS, MOST_ROWS = 40, 500, 2_000
_MOST_NAMES = 4


def write(path: Path, runs: Sequence[Kept], days: Sequence[Night] = ()) -> None:
    """Writes the page. Raises OSError if that fails."""
    write_atomically(path, text(runs, path.parent, days))


def text(runs: Sequence[Kept], home: Path, days: Sequence[Night] = ()) -> str:
    """The HTML of the page of many runs. `home`: the folder of the page; links to reports are relative to it."""
    by_scenario: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in runs:
        if one.result.recoveries:
            by_scenario[one.result.scenario].append(_point(one))
    trends = _trends(by_scenario, "caught up, s")
    nights: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for night in days:
        nights[night.name].append(_night(night))
    trends = _trends(nights, "time in which training went on, %") + trends
    left_out = []
    if len(trends) > MOST_TRENDS:
        left_out.append(f"the trends of {MOST_TRENDS} of {len(trends)} scenarios are drawn")
    if len(runs) > MOST_ROWS:
        left_out.append(f"the last {MOST_ROWS} of {len(runs)} runs are listed")
    newest = {one.result.scenario: one for one in runs}
    return render("index.html", {"trends": trends[:MOST_TRENDS]}, {
        "happened": _happened(newest), "gauges": _gauges([*newest.values()]),
        "rows": [_row(kept, home) for kept in reversed(runs[-MOST_ROWS:])],
        "count": len(runs), "told": verdicts_in_words(kept.result.verdict for kept in runs),
        "trends": [trend["scenario"] for trend in trends[:MOST_TRENDS]], "left_out": left_out,
        "days": [_day(one) for one in reversed(days[-MOST_ROWS:])],
    })  # fmt: skip


def _happened(newest: Mapping[str, Kept]) -> str:
    """How the newest run of each scenario ended: the worst first, with names."""
    if not newest:
        return "There are game days only."
    parts = []
    for verdict in reversed(Verdict):
        names = [scenario for scenario, one in newest.items() if one.result.verdict is verdict]
        more = ", …" if len(names) > _MOST_NAMES else ""
        whom = f" ({', '.join(names[:_MOST_NAMES])}{more})" if verdict is not Verdict.PASSED else ""
        parts += [f"{len(names)} {verdict.value}{whom}"] if names else []
    return f"The newest run of each scenario: {', '.join(parts)}."


def _gauges(newest: Sequence[Kept]) -> list[Gauge]:
    """How many of the newest runs passed, and the worst figure of each kind: the figure farthest beyond its bound or,
    if all are within, nearest to it. `newest`: the newest run of each scenario."""
    if not newest:
        return []
    passed = sum(one.result.verdict is Verdict.PASSED for one in newest)
    state = "passed" if passed == len(newest) else "failed"
    found = [(gauge, one.result.scenario) for one in newest for gauge in gauges(one.result) if gauge.share is not None]
    nearest = {
        gauge.name: replace(gauge, bound=f"{gauge.bound}, {scenario}")
        for gauge, scenario in sorted(found, key=lambda pair: (pair[0].state == "failed", pair[0].share or 0.0))
    }
    share = passed / len(newest)
    return [Gauge("newest runs that passed", str(passed), f"of {len(newest)}", state, share), *nearest.values()]


def _trends(points: Mapping[str, list[dict[str, Any]]], label: str) -> list[dict[str, Any]]:
    return [
        {"scenario": name, "label": label, "runs": some[-MOST_POINTS:]}
        for name, some in sorted(points.items())
        if len(some) > 1
    ]


def _point(kept: Kept) -> dict[str, Any]:
    return {
        "commit": kept.commit[:10], "started": kept.result.started, "verdict": kept.result.verdict.value,
        "value": kept.caught_up_s, "bound": _bounds(kept).get("catch_up"),
    }  # fmt: skip


def _night(night: Night) -> dict[str, Any]:
    return {
        "commit": night.commit[:10], "started": night.started, "verdict": night.verdict,
        "value": None if night.ettr is None else round(100 * night.ettr, 2),
    }  # fmt: skip


def _day(night: Night) -> dict[str, Any]:
    return {
        "name": night.name, "seed": night.seed, "started": night.started, "commit": night.commit,
        "verdict": night.verdict,
        "why": "" if night.verdict == "passed" else night.why, "ettr": night.ettr,
        "caught_up": fmean(night.caught_up_s) if night.caught_up_s else None, "lost_steps": sum(night.lost_steps),
        "outcomes": ", ".join(f"{many} {outcome}" for outcome, many in night.outcomes.items()),
    }  # fmt: skip


def _bounds(kept: Kept) -> Mapping[str, Any]:
    """The bounds of the run's recovery_time; empty without that assertion."""
    return next((case.bound for case in kept.result.cases if case.name == "recovery_time"), {})


def _row(kept: Kept, home: Path) -> dict[str, Any]:
    result, report = kept.result, RunDir(Path(kept.result.run_dir)).report
    bounds = _bounds(kept)
    return {
        "scenario": result.scenario, "seed": result.seed, "started": result.started, "commit": kept.commit,
        "verdict": result.verdict.value, "reason": "" if result.verdict is Verdict.PASSED else why(result).lead,
        "caught_up": kept.caught_up_s, "bound_s": bounds.get("catch_up"), "bound_steps": bounds.get("lost_steps"),
        "lost_steps": kept.lost_steps, "recovered": bool(result.recoveries),
        "link": os.path.relpath(report, home) if report.is_file() else "",
    }  # fmt: skip
