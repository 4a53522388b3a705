"""The metrics of a history, in the text format of Prometheus."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from recorded import judged, recorded

from torchaos.harness.cli import cli
from torchaos.harness.record.result import Result, Verdict
from torchaos.harness.reporting.telemetry import metrics_text as text
from torchaos.harness.reporting.trend_store import Kept

LINE = re.compile(r'(# (HELP|TYPE) torchaos_\w+ .+|torchaos_\w+\{(\w+="([^"\\\n]|\\["\\n])*",?)+\} [\d.e+-]+)')


@pytest.fixture
def result(tmp_path: Path) -> Result:
    return judged(recorded(tmp_path / "run"))


def test_the_newest_run_counts(result: Result) -> None:
    """Verdict, times and steps are of the newest run of each scenario; the numbers of runs are of all."""
    failed = replace(result, verdict=Verdict.FAILED, recoveries=())
    metrics = text([Kept(failed, ""), Kept(result, "")])
    assert 'torchaos_runs{scenario="kill-then-freeze",verdict="failed"} 1\n' in metrics
    assert 'torchaos_runs{scenario="kill-then-freeze",verdict="passed"} 1\n' in metrics
    assert 'torchaos_last_run_verdict{scenario="kill-then-freeze",verdict="passed"} 1\n' in metrics
    assert 'torchaos_last_run_verdict{scenario="kill-then-freeze",verdict="failed"} 0\n' in metrics
    assert re.search(r'torchaos_recovery_seconds\{scenario="kill-then-freeze",fault="process.kill"\} 20\.67', metrics)
    assert 'torchaos_recovery_bound_seconds{scenario="kill-then-freeze"} 60\n' in metrics
    assert "torchaos_recovery_seconds" not in text([Kept(result, ""), Kept(failed, "")])


def test_each_line_has_the_form_of_the_format(result: Result) -> None:
    """Quotes, backslashes and line ends in a name are escaped; each metric has its help and type once, before it."""
    nasty = replace(result, scenario='a"b\\c\nd')
    metrics = text([Kept(nasty, "")])
    lines = metrics.splitlines()
    assert metrics.endswith("\n")
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert 'scenario="a\\"b\\\\c\\nd"' in metrics
    helps = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert len(helps) == len(set(helps)) >= 5


def test_an_empty_history_has_no_metric() -> None:
    """Nothing is made up where nothing is known."""
    assert text([]) == ""


@pytest.mark.needs("promtool")
def test_promtool_accepts_it(result: Result) -> None:
    """Prometheus' own checker finds no mistake."""
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text([Kept(result, "")]), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_history_writes_it(tmp_path: Path, result: Result) -> None:
    """`history --prometheus FILE` writes the file and says where."""
    file = tmp_path / "torchaos.prom"
    done = CliRunner().invoke(cli, ["history", "--out", str(tmp_path), "--prometheus", str(file)])
    assert done.exit_code == 0, done.output
    assert done.output == f"{file}\n"
    assert "torchaos_recovery_seconds" in file.read_text()
