"""A run as a trace of OpenTelemetry, sent by its SDK to a server on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from recorded import change_events, judged, lose, recorded
from webhooks import listening

from torchaos.harness.cli import cli
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.telemetry import MISSING, Span, send, spans_of


def every(span: Span) -> Iterator[Span]:
    yield span
    for one in span.inside:
        yield from every(one)


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    """The run in which a rank is killed in step 12 and another stopped in step 13. It fails, by another loss."""
    folder = recorded(tmp_path / "run")
    change_events(folder, "rank0-a1", lose(9))
    judged(folder)
    return folder


def test_a_run_is_a_span_with_all_others_inside(folder: RunDir) -> None:
    """The faults, their recoveries with the parts, and the cases of the verdict; each lies within the run's time. What
    did not pass has the reason as its error."""
    result = judged(folder)
    root = spans_of(Record.load(folder), result)
    assert root.name == result.scenario
    assert root.end_s - root.begin_s == pytest.approx(result.duration_s, abs=0.01)
    assert all(root.begin_s <= one.begin_s <= one.end_s <= root.end_s + 0.01 for one in every(root))
    names = [one.name for one in root.inside]
    assert names[:2] == ["process.kill", "process.freeze"]
    assert names.count("recovery") == 2
    kill, recovery = root.inside[0], root.inside[names.index("recovery")]
    assert kill.begin_s == kill.end_s == recovery.begin_s
    assert kill.attributes["torchaos.fault.ranks"] == [1]
    assert sum(part.end_s - part.begin_s for part in recovery.inside) == pytest.approx(
        recovery.end_s - recovery.begin_s
    )
    cases = {one.name: one for one in root.inside if "test.case.name" in one.attributes}
    assert set(cases) == {case.name for case in result.cases}
    assert cases["loss_continuity"].attributes["test.case.result.status"] == "fail"
    assert cases["rollback"].attributes["test.case.result.status"] == "pass"
    assert cases["loss_continuity"].problem.startswith("failed: ")
    assert root.problem == f"failed: {result.reason}"


def test_a_receiver_gets_the_run(folder: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """`report --otel` posts to the address of OTEL_EXPORTER_OTLP_ENDPOINT; with the TRACEPARENT of a pipeline, the run
    is a part of the pipeline's trace. Secrets are masked, and OTEL_RESOURCE_ATTRIBUTES is respected."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs opentelemetry-exporter-otlp-proto-http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    raw = json.loads(folder.result.read_text()) | {"reproduce": "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz torchaos run x"}
    folder.result.write_text(json.dumps(raw))
    monkeypatch.setenv("TRACEPARENT", f"00-{'ab' * 16}-{'cd' * 8}-01")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    with listening() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        done = CliRunner().invoke(cli, ["report", str(folder.root), "--otel"], catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    (body,) = server.raw
    (found,) = ExportTraceServiceRequest.FromString(body).resource_spans
    about = {one.key: one.value.string_value for one in found.resource.attributes}
    assert (about["service.name"], about["deployment.environment.name"]) == ("torchaos", "staging")
    spans = found.scope_spans[0].spans
    assert {span.trace_id for span in spans} == {bytes.fromhex("ab" * 16)}
    (root,) = (span for span in spans if span.parent_span_id == bytes.fromhex("cd" * 8))
    run = Record.load(folder)
    assert root.start_time_unix_nano == pytest.approx(run.events[0].wall_s * 1e9, abs=1e6)
    root_of = spans_of(run, judged(folder))
    assert sum(span.parent_span_id == root.span_id for span in spans) == len(root_of.inside)
    assert b"hf_abcdef" not in body


def test_a_receiver_that_refuses_changes_nothing(folder: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says that nothing was sent, and ends as without it. So it does for an exporter that is not there."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs opentelemetry-exporter-otlp-proto-http")
    run, result = Record.load(folder), judged(folder)
    with listening() as server:
        server.answer = 400
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        assert send(run, result) == "the receiver did not take the spans"
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    assert "no exporter pigeon" in send(run, result)


def test_without_the_extra_the_missing_part_is_named(folder: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named, and the exit code stays as it was."""
    monkeypatch.setitem(sys.modules, "opentelemetry.propagate", None)
    done = CliRunner().invoke(cli, ["report", str(folder.root), "--otel"], catch_exceptions=False)
    assert done.exit_code == 0
    assert MISSING in done.stderr
