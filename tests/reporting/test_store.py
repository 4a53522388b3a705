"""The history of runs: it outlives them, is shared by processes, and is shown as a table and a page."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from malformed import GOOD
from recorded import judged, recorded

from torchaos.harness.cli import cli
from torchaos.harness.cli.results import keep
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.result import Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting import trend_store
from torchaos.harness.reporting.trend_store import kept_of, path_of


def finished(folder: Path, commit: str, slower: float = 0.0, verdict: str = "passed") -> RunDir:
    """A run as it lies in an --out folder."""
    run = recorded(folder)
    judged(run)
    raw = json.loads(run.result.read_text())
    raw["recoveries"][0]["parts"]["caught_up"] += slower
    raw["verdict"], raw["started"] = verdict, f"2026-11-20T0{len(list(folder.parent.iterdir()))}:00:00"
    run.result.write_text(json.dumps(raw))
    at = run.artifacts / "environment.json"
    at.write_text(json.dumps({**json.loads(at.read_text()), "commit": commit}))
    return run


def torchaos(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of an old commit, three slower ones of a new one."""
    folder = tmp_path_factory.mktemp("out")
    for number in range(6):
        finished(folder / f"run-{number}", "a" * 40 if number < 3 else "b" * 40, number / 10 + (number >= 3) * 20)
    return folder


def test_the_history_has_a_line_for_each_run(tmp_path: Path) -> None:
    """And one below it for the cause, if it did not pass, at any width."""
    finished(tmp_path / "out" / "one", "a" * 40)
    finished(tmp_path / "out" / "two", "b" * 40, verdict="failed")
    lines = torchaos("history", "--out", tmp_path / "out").output.strip().splitlines()
    assert len(lines) == 5
    assert lines[3].endswith("failed")


def test_the_history_lists_runs_by_commit(out: Path) -> None:
    """Every run below the folder is taken in, in order of time, with its commit and how long its recovery took."""
    done = torchaos("history", "--out", out)
    assert done.exit_code == 0, done.output
    assert done.output.count("aaaaaaaaaaaa") == done.output.count("bbbbbbbbbbbb") == 3
    (raw, *_rest) = json.loads(torchaos("history", "--out", out, "--json").output)
    assert raw["scenario"] == "kill-then-freeze"
    assert raw["commit"] == "a" * 40
    assert torchaos("history", "--out", out, "--last", "1").output.count("passed") == 1


def test_commits_are_compared(out: Path) -> None:
    """B's commit against A's is a regression with exit code 1, the other way round there is none, and folders and files
    of results can be compared too; what is not known is said."""
    torchaos("history", "--out", out)
    worse = torchaos("compare", "aaaa", "bbbb", "--out", out)
    assert worse.exit_code == 1, worse.output
    assert "WORSE" in worse.output
    assert torchaos("compare", "bbbb", "aaaa", "--out", out).exit_code == 0
    assert torchaos("compare", out / "run-0", out / "run-4", "--out", out).exit_code == 2, "one run each"
    assert torchaos("compare", out, out, "--out", out).exit_code == 0
    file = out / "results.json"
    file.write_text(json.dumps({"schema": 1, "results": [json.loads((out / "run-0" / "result.json").read_text())]}))
    assert torchaos("compare", file, out / "run-0", "--out", out).exit_code == 0
    with pytest.raises(UsageError, match="no run, file of results or commit"):
        torchaos("compare", "cccc", "aaaa", "--out", out)
    with pytest.raises(UsageError, match="not a file of results"):
        torchaos("compare", out / "run-0" / "plan.json", "aaaa", "--out", out)


def test_the_page_over_all_runs(out: Path, tmp_path: Path) -> None:
    """It lists every run, links those that have a page of their own, and draws a trend per scenario."""
    torchaos("report", out / "run-1")
    page = out / "index.html"
    assert torchaos("history", "--out", out, "--html", page).exit_code == 0
    text = page.read_text()
    assert text.count('<span class="badge passed">') == 6
    assert 'href="run-1/report.html"' in text
    assert text.count("<a href=") == 1
    assert '"label": "caught up, s"' in text
    assert 'id="trend-0"' in text


def test_what_is_pruned_stays_in_the_history(tmp_path: Path) -> None:
    """A run directory that is gone keeps its row; one that is judged again replaces it."""
    run = finished(tmp_path / "out" / "run", "a" * 40)
    history = path_of(tmp_path / "out")
    assert keep(kept_of(run).result, run) == []
    assert run.report.is_file()
    assert [path.name for path in run.root.parent.iterdir()] == ["run"], "who lists the folder finds runs alone"
    trend_store.add_runs(history, [replace(kept_of(run), result=replace(kept_of(run).result, verdict=Verdict.FAILED))])
    shutil.rmtree(run.root)
    (kept,) = trend_store.kept(history)
    assert kept.result.verdict is Verdict.FAILED
    assert history.stat().st_mode & 0o077 == 0


def test_a_report_that_can_t_be_written_is_a_note(tmp_path: Path) -> None:
    """Neither a page nor a history that can't be written stands in the way of a verdict: it is told."""
    run = finished(tmp_path / "out" / "run", "")
    result = kept_of(run).result
    run.report.mkdir()
    path_of(tmp_path / "out").write_text("this is no database, and long enough to be taken for a damaged one" * 20)
    page, history = keep(result, run)
    assert "report.html can't be written" in page
    assert "the history can't be used" in history


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    """Scenarios that end at the same time all have their row."""
    kept = kept_of(finished(tmp_path / "out" / "run", ""))
    history = tmp_path / "history.sqlite"
    many = [replace(kept, result=replace(kept.result, run_dir=f"/runs/{number}")) for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: trend_store.add_runs(history, [one]), many))
    assert len(trend_store.kept(history)) == 24


def test_somebody_else_s_database_is_left_alone(tmp_path: Path) -> None:
    """A database that is not ours, a link and a pipe in the history's place are refused, and stay as they are."""
    path = tmp_path / "theirs.sqlite"
    with closing(sqlite3.connect(path)) as theirs, theirs:
        theirs.execute("CREATE TABLE precious (x)")
    path.chmod(0o644)
    before, link, pipe = path.read_bytes(), tmp_path / "link.sqlite", tmp_path / "pipe.sqlite"
    link.symlink_to(tmp_path / "elsewhere.sqlite")
    os.mkfifo(pipe)
    for at, why in ((path, "not a history"), (link, "a link"), (pipe, "not a file")):
        with pytest.raises(UsageError, match=why):
            trend_store.add_runs(at, [])
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (before, 0o644)
    assert not (tmp_path / "elsewhere.sqlite").exists()


def test_an_older_history_is_its_owner_s_alone_again(tmp_path: Path) -> None:
    """An empty file becomes a history, one of ours stays one, and whoever could read it no longer can."""
    path = tmp_path / "history.sqlite"
    path.touch(0o644)
    trend_store.add_runs(path, [kept_of(finished(tmp_path / "out" / "run", ""))])
    path.chmod(0o644)
    assert len(trend_store.kept(path)) == 1
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change", [{"seed": 2**64}, {"run_dir": "/runs/\udcff"}])
def test_what_sqlite_can_t_hold_is_a_note(tmp_path: Path, change: dict[str, Any]) -> None:
    """A seed over 64 bits, or a folder whose name is no UTF-8: told as a UsageError, not as an internal one."""
    kept = kept_of(finished(tmp_path / "out" / "run", ""))
    with pytest.raises(UsageError, match="the history can't be used"):
        trend_store.add_runs(tmp_path / "history.sqlite", [replace(kept, result=replace(kept.result, **change))])


def test_seeds_are_bounded(tmp_path: Path) -> None:
    """No seed that the history can't hold gets as far as a run."""
    path = tmp_path / "scenario.yaml"
    path.write_text(GOOD)
    done = CliRunner().invoke(cli, ["plan", str(path), "--seed", str(2**63)])
    assert done.exit_code == 2
    assert "is not in the range" in done.output


def test_looking_counts_no_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the history is asked for, by whatever path, each run is one run, and looking changes no file."""
    run = finished(tmp_path / "torchaos-runs" / "run-1", "a" * 40)
    keep(kept_of(run).result, run)
    monkeypatch.chdir(tmp_path)
    history = path_of(tmp_path / "torchaos-runs")
    before = history.read_bytes()
    for _time in range(2):
        assert len(json.loads(torchaos("history", "--json").output)) == 1
        compared = torchaos("compare", "aaaa", "aaaa")
        assert "1 passed" in compared.output
    assert history.read_bytes() == before


def test_looking_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that no history has yet are shown from their directories, and compared by commit."""
    finished(tmp_path / "torchaos-runs" / "run-1", "a" * 40)
    monkeypatch.chdir(tmp_path)
    assert len(json.loads(torchaos("history", "--json").output)) == 1
    assert torchaos("compare", "aaaa", "aaaa").exit_code == 0
    assert not path_of(tmp_path / "torchaos-runs").exists()


def test_a_history_that_holds_runs_twice_is_read_right(tmp_path: Path) -> None:
    """An earlier version wrote a run under its relative path too; it counts once, under the absolute one."""
    kept = kept_of(finished(tmp_path / "out" / "run-1", "a" * 40))
    twice = replace(kept, result=replace(kept.result, run_dir="out/run-1"))
    for order in ([kept, twice], [twice, kept]):
        history = tmp_path / f"{order[0].result.run_dir.count('/')}.sqlite"
        trend_store.add_runs(history, order)
        (found,) = trend_store.kept(history)
        assert found.result.run_dir == str(tmp_path / "out" / "run-1")
