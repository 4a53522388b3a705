"""Puts a page together: data, template, style, script and the charting library, all in one file. Templates are Jinja2's
with autoescape; data for the charts is JSON with `<`, `>` and `&` as escapes. A content security policy with the hashes
of the page's own scripts blocks everything else, even if a log contains a script."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.verdict.verdict import records_of
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.plan import seconds_in_words
from torchaos.harness.record.record import Record, without_steps
from torchaos.harness.record.result import Recovery, Result
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.record.secrecy import mask
from torchaos.harness.reporting.html.account import checkpoints_of, folded, samples_of
from torchaos.harness.reporting.html.charts import curves_of, gpus_of
from torchaos.harness.reporting.html.log_evidence import dumps_of, hangs_of, logs_of, stamps_of, words
from torchaos.harness.reporting.html.page_timeline import PHASES, flame_of, timeline_of
from torchaos.harness.reporting.terminal import recovery_timeline as parts_timeline
from torchaos.harness.reporting.terminal.brief import why, without_words
from torchaos.harness.reporting.terminal.headline import cards, failures_first, happened
from torchaos.harness.reporting.terminal.text import name_in_words, printable, shortened, value_in_words

if TYPE_CHECKING:
    from jinja2 import Environment, Template

_SCRIPTS, _STYLES = ("uPlot.iife.min.js", "charts.js"), ("uPlot.min.css", "page.css")
_MOST_TEXT = 60_000  # the most characters of a text
_MOST_STORY = 300  # lines
STORY = frozenset(Kind) - {
    Kind.STEP, Kind.LOSS, Kind.LOG_STEP, Kind.NETWORK, Kind.GPU, Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.LOAD_BEGIN,
    Kind.LOAD_END, Kind.AGENT_STARTED,
}  # fmt: skip


def write(folder: RunDir, result: Result, records: tuple[Record, list[Record]] | None = None) -> None:
    """Writes report.html into the run directory, readable only by its owner. Raises ChaosError or OSError if the
    directory can't be read or written."""
    write_atomically(folder.report, text(folder, result, records), private=True)


def text(
    folder: RunDir, result: Result, records: tuple[Record, list[Record]] | None = None, ranks: Collection[int] = ()
) -> str:
    """The HTML of the page of a run. `records`: those of the run and its twins, if they were read already. `ranks`:
    those that must have a lane in the timeline."""
    run, twins = records or records_of(folder)
    replicas = run.plan.job.replicas
    run = run if replicas == 1 else without_steps(run)
    timeline = timeline_of(run, result.recoveries, stamps_of(folder), ranks)
    curves = curves_of(run, twins)
    left_out = [*timeline.left_out, *([curves["left_out"]] if curves["left_out"] else [])]
    left_out += [f"The steps of {replicas} replicas are not shown: each has its own"] if replicas > 1 else []
    gpus = gpus_of(run)
    charts = {"timeline": asdict(timeline), "phases": PHASES, "curves": curves, "gpus": gpus["charts"]}
    return render("report.html", charts, {
        "result": result.to_json(), "happened": happened(run, result), "why": why(result)._asdict(),
        "gauges": cards(result),
        "cases": [
            _case({**asdict(case), "reason": without_words(case.reason, result)})
            for case in failures_first(result.cases)
        ],
        "recoveries": [_recovery(recovery) for recovery in result.recoveries],
        "landed": len(landings(run)), "has_steps": bool(curves["steps"]), "curves": curves,
        "samples": samples_of(run, twins), "checkpoints": folded(checkpoints_of(run)),
        "logs": logs_of(folder, run), "hangs": hangs_of(run), "dumps": dumps_of(folder),
        "gpus": gpus,
        "story": _story(run), "environment": _environment(run), "job": _job(run),
        "scenario": folder.scenario.read_text(errors="replace") if folder.scenario.is_file() else "",
        "left_out": left_out,
    })  # fmt: skip


def render(template: str, charts: Mapping[str, Any], context: Mapping[str, Any]) -> str:
    """The HTML of a page, from a template. `charts`: data for the page's script; `context`: values for the template."""
    scripts = [_static(name) for name in _SCRIPTS]
    return template_of(template).render(
        charts=clean(charts), scripts=scripts, styles=[_static(name) for name in _STYLES],
        licence=_static("uPlot.LICENSE"), hashes=[_hash(script) for script in scripts], **clean(context),
    )  # fmt: skip


def clean(value: Any) -> Any:
    """A copy in which every text is shortened and has no secrets or dangerous characters, and every number is
    finite."""
    if isinstance(value, float):  # first, because charts have mostly floats; JSON has no NaN and no infinity
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return shortened(printable(mask(value)), _MOST_TEXT)
    if isinstance(value, Mapping):
        return {clean(str(key)): clean(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(one) for one in value]
    return value


def template_of(name: str) -> Template:
    return _environment_of_templates().get_template(name)


@lru_cache(maxsize=1)
def _environment_of_templates() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # imported here, because only pages need it

    found = Environment(
        loader=FunctionLoader(lambda name: _static(name)), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["seconds"] = seconds_in_words
    found.filters["plain"] = name_in_words
    return found


@lru_cache
def _static(name: str) -> str:
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _case(case: Mapping[str, Any]) -> dict[str, Any]:
    measured, bound, seconds = case["measured"], case["bound"], case["seconds"]
    rows = [
        {
            "name": name_in_words(name),
            "measured": value_in_words(name, measured[name], seconds) if name in measured else "",
            "bound": value_in_words(name, bound[name], seconds) if name in bound else "",
        }
        for name in dict.fromkeys((*bound, *measured))
    ]
    return {**case, "verdict": case["verdict"].value, "words": name_in_words(case["name"]), "rows": rows}


def _recovery(recovery: Recovery) -> dict[str, Any]:
    spans = parts_timeline.spans(recovery.parts)
    whole = max((span.end_s for span in spans if span.end_s is not None), default=0.0)
    longest = max((span.took_s for span in spans), default=0.0)
    rows = [
        {
            "part": span.part, "words": parts_timeline.over_in_words(span.part), "end": span.end_s, "took": span.took_s,
            "left": 100 * span.begin_s / whole if whole else 0.0, "width": 100 * span.took_s / whole if whole else 0.0,
            "longest": span.took_s == longest > 0,
        }
        for span in spans
    ]  # fmt: skip
    return {
        "fault": recovery.fault, "rows": rows, "advice": recovery.advice, "flame": flame_of(recovery.parts),
        "words": parts_timeline.outcome_in_words(recovery),
    }  # fmt: skip


def _story(run: Record) -> list[dict[str, Any]]:
    """The notable events, in order of time."""
    start = run.events[0].mono_s if run.events else 0.0
    told = [event for event in run.beside_steps if event.kind in STORY]
    lines = [
        {"at": round(event.mono_s - start, 2), "kind": event.kind.value, "text": line}
        for event, line in words(run.plan, told)
    ]
    kept = _MOST_STORY // 2
    return lines if len(lines) <= _MOST_STORY else [
        *lines[:kept], {"at": lines[kept]["at"], "kind": "", "text": f"{len(lines) - 2 * kept} lines are left out"},
        *lines[-kept:],
    ]  # fmt: skip


def _environment(run: Record) -> dict[str, str]:
    found = run.artifacts.get("environment")
    return {str(name): str(value) for name, value in found.items() if name != "reproduce"} if isinstance(
        found, dict) else {}  # fmt: skip


def _job(run: Record) -> dict[str, Any]:
    plan = run.plan.masked()
    return {
        "command": " ".join(plan.job.command), "cwd": plan.job.cwd, "env": dict(plan.job.env),
        "world_size": plan.job.world_size, "nodes": plan.job.nodes, "launcher": plan.launcher,
        "hooks": ", ".join(plan.hooks),
    }  # fmt: skip
