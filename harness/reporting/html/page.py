"""Puts the page of a run together: data, tables, template, style, script and the charting library, all in one file.

Templates are Jinja2's with autoescape; data for the charts is JSON with `<`, `>` and `&` as escapes. A content
security policy with the hashes of the page's own scripts blocks everything else, even if a log contains a script."""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import os.path
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from torchaos.harness.analysis.comparison.agreement import common, history_of
from torchaos.harness.analysis.comparison.sample_counts import are_summed
from torchaos.harness.analysis.comparison.sample_reasons import Computed
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.verdict import records_of
from torchaos.harness.checkpoints.formats.format_table import may_hold_tensors
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import Need
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.checkpoint_names import final_path
from torchaos.harness.record.history import Execution, Save
from torchaos.harness.record.plan import counted, seconds_in_words
from torchaos.harness.record.record import Record, without_steps
from torchaos.harness.record.redaction import mask
from torchaos.harness.record.result import Recovery, Result
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.record.steps import Executions, StepTable
from torchaos.harness.reporting.html.charts import curves_of, gpus_of
from torchaos.harness.reporting.html.log_evidence import dumps_of, hangs_of, logs_of, stamps_of, words
from torchaos.harness.reporting.html.page_timeline import PHASES, flame_of, timeline_of
from torchaos.harness.reporting.terminal import headline as parts_timeline
from torchaos.harness.reporting.terminal.console import Why, why, without_words
from torchaos.harness.reporting.terminal.headline import cards, failures_first, happened
from torchaos.harness.reporting.terminal.text import name_in_words, printable, shortened, value_in_words

if TYPE_CHECKING:
    from jinja2 import Environment, Template


_MOST_ROWS = 12
_GONE = "it no longer exists"
_SHOWN = 3  # the most successive checkpoints that no longer exist and have rows of their own


def samples_of(run: Record, twins: Sequence[Record]) -> dict[str, Any]:
    """For each attempt, the numbers of samples that the run and its twin consumed; and the steps in which they differ.
    Empty if no sample was seen."""
    history = history_of(run, twins)
    mine, other = history.by_step(), twins[0].history.by_step() if twins else StepTable.of({})
    if not _many(mine.executions):
        return {}
    attempts = [
        {
            "number": attempt.number, "base": attempt.base, "first": attempt.first_step, "last": attempt.last_step,
            "loaded": os.path.basename(attempt.loaded) if attempt.loaded else None,
            "samples": int(history.executions.of_attempt(attempt.number).column("in_samples").sum()),
        }
        for attempt in history.attempts
    ]  # fmt: skip
    found: dict[str, Any] = {
        "attempts": attempts, "counted": _many(mine.executions), "steps": len(mine),
        "executed": sum(attempt["samples"] for attempt in attempts), "twin": None, "differ": 0, "computed": 0,
        "rows": [],
    }  # fmt: skip
    if other:
        differ, computed = _differ(mine, other), Computed(history, mine, other)
        own = {step for step in differ if computed.follows(step)}  # not known: see sample_accounting
        differ = [step for step in differ if step not in own]
        ours, theirs = ({step: _samples(steps.get(step, {})) for step in differ} for steps in (mine, other))
        found |= {"twin": _many(other.executions), "differ": len(differ), "computed": len(own)}
        if not are_summed(mine, other):  # otherwise it is not known which samples these are
            found |= {"skipped": _over(theirs, ours, differ), "repeated": _over(ours, theirs, differ)}
            found |= {"rows": [_row(step, ours, theirs) for step in differ[:_MOST_ROWS]]}
    return found


def _many(steps: Executions) -> int:
    return int(_counts(steps).sum())


def _counts(steps: Executions) -> Any:
    """For each step: the number of its samples that are known, by their digests or by the sum of these."""
    return np.where(steps.column("summed"), steps.column("in_samples"), steps.column("in_seen"))


def _differ(ours: StepTable, theirs: StepTable) -> list[int]:
    """The steps in which the samples of all ranks together are not the twin's."""
    mine, twins = common(ours, theirs)
    same = np.ones(len(mine), bool)
    for read in (_counts, lambda steps: steps.column("samples_sum")):
        same &= mine.sums(read(mine.executions)) == twins.sums(read(twins.executions))
    found: list[int] = np.setdiff1d(np.union1d(ours.numbers, theirs.numbers), mine.numbers[same]).tolist()
    return found


def _samples(by_rank: Mapping[int, Execution]) -> list[str]:
    return sorted(sample for one in by_rank.values() for sample in one.samples if sample is not None)


def _over(these: Mapping[int, list[str]], those: Mapping[int, list[str]], steps: Iterable[int]) -> int:
    """How many samples of the first side the second side lacks. A sample that the first side has twice must be there
    twice."""
    one, other = Counter[str](), Counter[str]()
    for step in steps:
        one.update(these.get(step, ()))
        other.update(those.get(step, ()))
    return (one - other).total()


def _row(step: int, ours: Mapping[int, list[str]], theirs: Mapping[int, list[str]]) -> dict[str, Any]:
    a, b = Counter(ours.get(step, ())), Counter(theirs.get(step, ()))
    return {"step": step, "run": a.total(), "twin": b.total(), "common": (a & b).total()}


def checkpoints_of(run: Record) -> list[dict[str, Any]]:
    """The history of each checkpoint. Each save is a row, in order of time, even if all saves write the same file. Then
    comes a row for each checkpoint on disk whose save was not seen. A load belongs to the newest save before it."""
    inventory = run.artifacts.get("inventory")
    looked = isinstance(inventory, dict) and bool(inventory.get("checkpoints"))
    listed = inventory.get("checkpoints", []) if isinstance(inventory, dict) else []
    home = inventory.get("root") if isinstance(inventory, dict) else run.plan.job.checkpoints
    folders = {os.path.dirname(save.path) for save in run.history.saves}
    roots = [str(home or ""), os.path.commonpath(folders) if folders else ""]
    entries = {str(one.get("path")): one for one in listed if isinstance(one, dict)}
    saves: dict[str, dict[tuple[int, int], Save]] = {}  # saves of one step to the same place count once
    for save in run.history.saves:
        name = _below(final_path(save.path), roots, entries)
        saves.setdefault(name, {})[save.attempt, save.local_step] = save
    rows: list[dict[str, Any]] = []
    for name, own in saves.items():
        rows += _saved(run, name, list(own.values()), entries.get(name), looked)
    rows.sort(key=lambda row: row["at"])
    return rows + [_there(name, entry, _loads(run, name)) for name, entry in entries.items() if name not in saves]


def folded(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a table, with one row for several successive checkpoints that no longer exist: many jobs keep only
    their newest checkpoints."""
    short: list[dict[str, Any]] = []
    for is_gone, group in itertools.groupby(rows, lambda row: row["state"] == _GONE and not row["loaded"]):
        some = list(group)
        if is_gone and len(some) > _SHOWN:
            first, last = some[0], some[-1]
            names = f"{first['name']} to {last['name']}: {counted(len(some), 'checkpoint')}"
            short.append(
                {**last, "name": names, "step": None, "at": None, "blocked": None, "state": "they no longer exist"}
            )
        else:
            short += some
    return short


def _below(path: str, roots: Sequence[str], entries: Mapping[str, Any]) -> str:
    """The name of the checkpoint in the inventory. Compares only the ends of paths, because the run directory may have
    been moved. If the inventory lacks the checkpoint, returns its path relative to the first of `roots` that contains
    it."""
    fitting = [name for name in entries if path == name or path.endswith("/" + name) or f"/{name}/" in path]
    own = next((os.path.relpath(path, root) for root in roots if root and path.startswith(root + "/")), path)
    return max(fitting, key=len, default=own)


def _saved(
    run: Record, name: str, saves: Sequence[Save], entry: Mapping[str, Any] | None, looked: bool
) -> Iterator[dict[str, Any]]:
    """The rows of one path, in order of time. The file that exists at the end is the result of the last save."""
    start = run.events[0].mono_s
    ends = [*(one.begun_s for one in saves[1:]), math.inf]
    for save, end_s, later in zip(saves, ends, [*saves[1:], None], strict=True):
        since_s = -math.inf if save is saves[0] else save.begun_s
        loaded = _loads(run, name, since_s, end_s)
        row = _there(name, entry, loaded) if entry and later is None else {
            "name": name, "format": save.format, "bytes": None, "verified": None, "good": None, "problem": None,
            "state": _gone(run, name, later, looked), "loaded": loaded,
        }  # fmt: skip
        if not save.ok:
            row = {**row, "state": f"{row['state']}; its save was never finished", "good": row["good"] and None}
        step = row.get("step") if save.global_step is None else save.global_step
        at, blocked = round(save.begun_s - start, 2), round(save.blocked_s, 3)
        yield {**row, "step": step, "attempt": save.attempt, "at": at, "blocked": blocked}


def _gone(run: Record, name: str, later: Save | None, looked: bool) -> str:
    """Why the state of a checkpoint is not known. The inventory has no file whose name fits no known format."""
    if later is not None:
        return "overwritten" if later.global_step is None else f"overwritten in step {later.global_step}"
    if looked and os.path.splitext(name)[1] and not may_hold_tensors(name):
        return "not read: its name shows no known format"
    if looked:
        return _GONE
    if Need.INVENTORY in run.plan.collect:
        return "not read: the run ended too early"
    return "not read: no assertion, such as checkpoint_integrity, needed it"


def _there(name: str, entry: Mapping[str, Any], loaded: Sequence[int]) -> dict[str, Any]:
    problem = entry.get("problem")
    whole = bool(entry.get("complete")) and bool(entry.get("loadable")) and not problem
    state = "whole" if whole else "incomplete" if not entry.get("complete") else "damaged"
    is_unread = whole and not (entry.get("tensors") or entry.get("values")) and bool(entry.get("problems"))
    return {
        "name": name, "step": entry.get("step"), "format": entry.get("format"), "bytes": entry.get("bytes"),
        "verified": None if is_unread else entry.get("verified"), "problem": problem,
        "state": "not read: its kind is not known" if is_unread else state, "good": None if is_unread else whole,
        "attempt": None, "at": None, "blocked": None, "loaded": loaded,
    }  # fmt: skip


def _loads(run: Record, name: str, since_s: float = -math.inf, until_s: float = math.inf) -> list[int]:
    """The attempts that loaded the checkpoint between these times (CLOCK_MONOTONIC)."""

    def fits(path: str) -> bool:
        plain = os.path.splitext(path)[0]  # ckpt.tmp may have become ckpt.pt
        return path == name or path.endswith("/" + name) or f"/{name}/" in path or plain.endswith("/" + name)

    loads = (load for load in run.history.loads if since_s <= load.mono_s < until_s)
    return sorted({load.attempt for load in loads if load.ok and fits(load.path)})


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
    """The HTML of the page of a run. `records`: the records of the run and its twins; None: read from `folder`.
    `ranks`: the ranks that must have a lane in the timeline."""
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
            _case({**asdict(case), "reason": _not_again(without_words(case.reason, result), why(result))})
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
    """A copy in which texts are shortened, secrets masked, dangerous characters escaped, and numbers that are not
    finite replaced."""
    if isinstance(value, float):  # first, because most values of charts are floats; JSON has no NaN and no infinity
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


def _not_again(reason: str, told: Why) -> str:
    """The reason of a case. Empty if the head of the page has it already, word for word."""
    return "as above" if reason and reason.rstrip(".").lower() in f"{told.lead}. {told.more}".lower() else reason


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
    gap = f"{counted(len(lines) - 2 * kept, 'line', 'is/are')} left out"
    return lines if len(lines) <= _MOST_STORY else [
        *lines[:kept], {"at": lines[kept]["at"], "kind": "", "text": gap},
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
