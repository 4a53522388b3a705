"""Many runs on one page: a table with a filter, a chart of the recovery times for each scenario, and a chart of the
share of training time for each game day."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from torchaos.harness.host.disk import write_atomically
from torchaos.harness.record.result import Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.gameday_history import Night
from torchaos.harness.reporting.html.page import render
from torchaos.harness.reporting.terminal.console import why
from torchaos.harness.reporting.terminal.headline import Gauge, gauges
from torchaos.harness.reporting.trend_store import Kept

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
    counts = Counter(kept.result.verdict for kept in runs)
    left_out = []
    if len(trends) > MOST_TRENDS:
        left_out.append(f"the trends of {MOST_TRENDS} of {len(trends)} scenarios are drawn")
    if len(runs) > MOST_ROWS:
        left_out.append(f"the last {MOST_ROWS} of {len(runs)} runs are listed")
    newest = {one.result.scenario: one for one in runs}
    return render("index.html", {"trends": trends[:MOST_TRENDS]}, {
        "happened": _happened(newest), "gauges": _gauges([*newest.values()]),
        "rows": [_row(kept, home) for kept in reversed(runs[-MOST_ROWS:])],
        "count": len(runs), "told": ", ".join(f"{counts[one]} {one.value}" for one in Verdict if counts[one]),
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
    """How many of the newest runs passed; and of each kind of figure, the one that is nearest to its bound or farthest
    beyond it."""
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
