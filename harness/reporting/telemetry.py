"""Exports runs to monitoring systems: metrics in Prometheus' text format, and a trace of OpenTelemetry."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from torchaos.harness.analysis.hit_targets import Landing, landings
from torchaos.harness.analysis.recovery_times import on_until_s
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.record.redaction import mask
from torchaos.harness.record.result import Case, Recovery, Result, Verdict, each_restart
from torchaos.harness.reporting.compare_runs import Night
from torchaos.harness.reporting.terminal import headline
from torchaos.harness.reporting.terminal.headline import failures_first
from torchaos.harness.reporting.terminal.text import printable
from torchaos.harness.reporting.trend_store import Kept

Sample = tuple[Mapping[str, str], float]


def write_metrics(path: Path, runs: Sequence[Kept], days: Sequence[Night] = ()) -> None:
    """Writes the file atomically, as Prometheus's textfile collector requires. Raises OSError if it can't be
    written."""
    write_atomically(path, metrics_text(runs, days))


def metrics_text(runs: Sequence[Kept], days: Sequence[Night] = ()) -> str:
    """The metrics as text. `runs`, `days`: all runs and game days, in order of time."""
    newest = {one.result.scenario: one for one in runs}
    days_by_name = {one.name: one for one in days}
    metrics = {
        "torchaos_runs": ("Runs in the history, by verdict.", _counts(runs)),
        "torchaos_last_run_verdict": ("1 for the verdict of the newest run.", _verdicts(newest)),
        "torchaos_last_run_start_seconds": ("When the newest run began, in seconds since the epoch.", [
            ({"scenario": name}, _epoch(one.result.started)) for name, one in newest.items()
        ]),
        "torchaos_recovery_seconds": ("Seconds from the fault until the job had caught up.", _recoveries(newest)),
        "torchaos_recovery_bound_seconds": ("The bound of that time.", _bounds(newest)),
        "torchaos_lost_steps": ("Steps that were done again after the fault.", _lost(newest)),
        "torchaos_gameday_training_ratio": ("The share of the newest game day in which training went on.", [
            ({"gameday": name}, one.ettr) for name, one in days_by_name.items() if one.ettr is not None
        ]),
        "torchaos_gameday_faults": ("Faults of the newest game day, by outcome.", [
            ({"gameday": name, "outcome": outcome}, float(many))
            for name, one in days_by_name.items() for outcome, many in sorted(one.outcomes.items())
        ]),
    }  # fmt: skip
    lines = [line for name, (about, samples) in metrics.items() for line in _metric(name, about, list(samples))]
    return "\n".join(lines) + "\n" if lines else ""


def _metric(name: str, about: str, samples: Sequence[Sample]) -> Iterator[str]:
    if not samples:
        return
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} gauge"
    for labels, value in samples:
        told = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{{{told}}} {value:.10g}"


def _escaped(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _counts(runs: Sequence[Kept]) -> Iterator[Sample]:
    counts = Counter((one.result.scenario, one.result.verdict.value) for one in runs)
    for (scenario, verdict), many in sorted(counts.items()):
        yield {"scenario": scenario, "verdict": verdict}, float(many)


def _verdicts(newest: Mapping[str, Kept]) -> Iterator[Sample]:
    for scenario, one in newest.items():
        for verdict in Verdict:
            yield {"scenario": scenario, "verdict": verdict.value}, float(one.result.verdict is verdict)


def _recoveries(newest: Mapping[str, Kept]) -> Iterator[Sample]:
    """The slowest recovery from each fault. A recovery that never ended has no sample."""
    for scenario, one in newest.items():
        slowest: dict[str, float] = {}
        for recovery in one.result.recoveries:
            if (took := recovery.parts.get("caught_up")) is not None:
                slowest[recovery.fault] = max(took, slowest.get(recovery.fault, 0.0))
        for fault, took in slowest.items():
            yield {"scenario": scenario, "fault": fault}, took


def _bounds(newest: Mapping[str, Kept]) -> Iterator[Sample]:
    for scenario, one in newest.items():
        bound = next((case.bound.get("catch_up") for case in one.result.cases if case.name == "recovery_time"), None)
        if isinstance(bound, (int, float)):
            yield {"scenario": scenario}, float(bound)


def _lost(newest: Mapping[str, Kept]) -> Iterator[Sample]:
    for scenario, one in newest.items():
        known = [recovery for recovery in one.result.recoveries if recovery.lost_steps is not None]
        for fault in dict.fromkeys(recovery.fault for recovery in known):
            own = each_restart(recovery for recovery in known if recovery.fault == fault)
            yield {"scenario": scenario, "fault": fault}, float(sum(recovery.lost_steps or 0 for recovery in own))


def _epoch(started: str) -> float:
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        return 0.0


# A run as a trace of OpenTelemetry: a span for the run, and inside it spans of its faults, of each recovery with its
# parts, and of each case of the verdict.
#
# The SDK sends them (the extra `otel`), and OpenTelemetry's own variables set it up: OTEL_EXPORTER_OTLP_ENDPOINT,
# OTEL_TRACES_EXPORTER, OTEL_RESOURCE_ATTRIBUTES and others. If a pipeline has put TRACEPARENT into the environment, the
# run is a part of the pipeline's trace. Names of attributes: https://opentelemetry.io/docs/specs/semconv/, and
# `torchaos.` for our own.

MISSING = "OpenTelemetry's SDK and OTLP exporter are not installed (the extra `otel`)"
_CASES = {Verdict.PASSED: "pass", Verdict.FAILED: "fail"}
_SUITES = {Verdict.PASSED: "success", Verdict.FAILED: "failure", Verdict.ERROR: "aborted"}


@dataclass(frozen=True)
class Span:
    """A span of the trace. `begin_s`, `end_s`: seconds of CLOCK_MONOTONIC. `problem`: why its status is an error;
    empty: it is no error."""

    name: str
    begin_s: float
    end_s: float
    attributes: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    inside: tuple[Span, ...] = ()


def spans_of(run: Record, result: Result) -> Span:
    """The span of the run, with all others inside. Raises ValueError if the journal is empty."""
    if not run.events:
        raise ValueError("the run left no event")
    begin_s, end_s = run.events[0].mono_s, run.events[-1].mono_s
    hits = landings(run)
    inside = [
        *(_fault(run, result, hit) for hit in hits),
        *(_recovery(hit, one) for hit, one in zip(hits, result.recoveries, strict=False)),
        *(_case(case, end_s) for case in failures_first(result.cases)),
    ]
    return Span(result.scenario, begin_s, end_s, {
        "test.suite.name": result.scenario, "test.suite.run.status": _SUITES.get(result.verdict, "failure"),
        "torchaos.verdict": result.verdict.value, "torchaos.reason": result.reason, "torchaos.seed": result.seed,
        "torchaos.run_dir": result.run_dir, "torchaos.reproduce": result.reproduce,
        "torchaos.world_size": run.plan.job.world_size, "torchaos.steps": result.steps,
        **{f"torchaos.versions.{name}": version for name, version in result.versions.items()},
    }, _problem(result.verdict, result.reason), tuple(inside))  # fmt: skip


def _fault(run: Record, result: Result, hit: Landing) -> Span:
    """The span of a fault, from the time when it hit until its undo. If the fault can't be undone, the span has no
    length."""
    told = next((fault for fault in result.faults if fault.id == hit.fault), None)
    for_good = hit.fault in {event.data["record"] for event in run.of_kind(Kind.GUARDED) if event.data.get("why")}
    over_s = on_until_s(run, hit)
    end_s = hit.at_s if for_good or over_s == math.inf else over_s
    span = Span(told.inject if told else hit.fault, hit.at_s, end_s, {
        "torchaos.fault.id": hit.fault, "torchaos.fault.attempt": hit.attempt,
        "torchaos.fault.ranks": sorted(hit.ranks),
    })  # fmt: skip
    if told is None:
        return span
    more = {
        "torchaos.fault.target": told.target, "torchaos.fault.applied": told.applied,
        "torchaos.fault.evidence": told.evidence, "torchaos.verdict": told.verdict.value,
    }  # fmt: skip
    return replace(span, attributes=span.attributes | more, problem=_problem(told.verdict, told.reason))


def _recovery(hit: Landing, recovery: Recovery) -> Span:
    """The span of a recovery. If the job never recovered, the span ends with the last part that was seen."""
    parts = [
        Span(headline.spent_in_words(one.part), hit.at_s + one.begin_s, hit.at_s + max(one.begin_s, one.end_s))
        for one in headline.spans(recovery.parts)
        if one.end_s is not None
    ]
    back = recovery.parts.get("caught_up") is not None
    return Span(
        "recovery", hit.at_s, max((part.end_s for part in parts), default=hit.at_s),
        {"torchaos.fault.id": recovery.fault, "torchaos.lost_steps": recovery.lost_steps},
        "" if back or recovery.unseen or recovery.cut_off or recovery.unplaced else "the job never caught up",
        tuple(parts),
    )  # fmt: skip


def _case(case: Case, at_s: float) -> Span:
    return Span(case.name, at_s, at_s, {
        "test.case.name": case.name, "test.case.result.status": _CASES.get(case.verdict, case.verdict.value),
        "torchaos.verdict": case.verdict.value, "torchaos.reason": case.full_reason,
    }, _problem(case.verdict, case.full_reason))  # fmt: skip


def _problem(verdict: Verdict, reason: str) -> str:
    return "" if verdict is Verdict.PASSED else f"{verdict.value}: {reason}"


def send(run: Record, result: Result, commit: str = "") -> str:
    """Sends the trace. Returns what went wrong; empty if the receiver took it."""
    try:
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError:
        return MISSING
    try:
        root = spans_of(run, result)
        about = {"service.name": "torchaos", "service.version": result.versions.get("torchaos"),
                 "vcs.ref.head.revision": commit}  # fmt: skip
        resource = Resource({name: value for name, value in about.items() if value})
        memory, processor = InMemorySpanExporter(), SynchronousMultiSpanProcessor()
        processor.add_span_processor(SimpleSpanProcessor(memory))
        provider = TracerProvider(
            resource=Resource.get_empty().merge(resource).merge(OTELResourceDetector().detect()),
            active_span_processor=processor, shutdown_on_exit=False,
        )  # fmt: skip
        first = run.events[0]
        carrier = {name.lower(): os.environ[name] for name in ("TRACEPARENT", "TRACESTATE") if name in os.environ}
        parent = extract(carrier)
        _record(provider.get_tracer("torchaos"), root, parent, first.wall_s - first.mono_s)
        exporter = _exporter()
        taken = exporter.export(memory.get_finished_spans()) is SpanExportResult.SUCCESS
        exporter.shutdown()
    except Exception as error:  # nothing here may change a verdict
        return f"{type(error).__name__}: {error}"
    return "" if taken else "the receiver did not take the spans"


def _record(tracer: Any, span: Span, parent: Any, offset_s: float) -> None:
    """Records the span and those inside it. `offset_s`: wall-clock time minus CLOCK_MONOTONIC."""
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    attributes = {
        name: mask(value) if isinstance(value, str) else value
        for name, value in span.attributes.items()
        if value is not None
    }
    begin = _nanoseconds(span.begin_s + offset_s)
    started = tracer.start_span(span.name, parent, attributes=attributes, start_time=begin)
    if span.problem:
        started.set_status(Status(StatusCode.ERROR, mask(span.problem)))
    for one in span.inside:
        _record(tracer, one, set_span_in_context(started, parent), offset_s)
    started.end(_nanoseconds(span.end_s + offset_s))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _exporter() -> Any:
    """The exporter that OpenTelemetry's variables name. Raises ValueError if it is not installed."""
    name = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if name == "otlp":
        grpc = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").startswith("grpc")
        name = "otlp_proto_grpc" if grpc else "otlp_proto_http"
    found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
    if found is None:
        raise ValueError(f"no exporter {name} is installed (the extra `otel` has otlp_proto_http)")
    return found.load()()
