"""`latest` in place of a run directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from torchaos.harness.cli import cli
from torchaos.harness.cli.options import RunFolder, latest, remember
from torchaos.harness.interfaces import UsageError

RECORDED = Path(__file__).parents[1] / "data" / "runs"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs; the second one began last."""
    monkeypatch.chdir(tmp_path)
    for name, began in (("a", 1), ("b", 3), ("c", 2)):
        plan = tmp_path / "torchaos-runs" / name / "plan.json"
        (plan.parent / "events").mkdir(parents=True)
        plan.touch()
        os.utime(plan, (began, began))
    return tmp_path / "torchaos-runs"


def test_it_is_the_run_that_began_last(runs: Path) -> None:
    """Whatever the names are, and whatever was written into the directories later."""
    (runs / "a" / "report.html").touch()
    assert latest().absolute() == runs / "b"


def test_it_finds_the_runs_of_another_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that went to another folder by --out counts in the folder in which it was started, and nowhere else. A
    folder that is gone is forgotten; OUT/latest names the folder itself."""
    monkeypatch.setenv("XDG_STATE_HOME", str(runs.parent / "state"))
    other = runs.parent / "else" / "where"
    newest = other / "d" / "plan.json"
    (newest.parent / "events").mkdir(parents=True)
    newest.touch()
    os.utime(newest, (4, 4))
    assert RunFolder()("latest").absolute() == runs / "b", "it was not started here"
    assert RunFolder()("else/where/latest") == Path("else/where/d")
    remember(Path("else/where"))
    remember(runs)
    remember(Path("gone"))
    assert RunFolder()("latest") == other / "d"
    (runs.parent / "sub").mkdir()
    monkeypatch.chdir(runs.parent / "sub")
    with pytest.raises(UsageError, match="there is no run in"):
        RunFolder()("latest")


def test_an_exploration_is_no_run(runs: Path) -> None:
    """An exploration has a plan too, but no command for a run can read its directory."""
    (runs / "explored" / "recorded" / "events").mkdir(parents=True)
    (runs / "explored" / "plan.json").touch()
    assert latest().absolute() == runs / "b"


def test_a_folder_of_that_name_comes_first(runs: Path) -> None:
    """A path that exists is never read as a word."""
    (runs.parent / "latest").mkdir()
    assert RunFolder()("latest") == Path("latest")


def test_where_there_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the folder in which it looked."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"latest: there is no run in {tmp_path}/torchaos-runs; name a run directory"):
        CliRunner().invoke(cli, ["explain", "latest"], catch_exceptions=False)


@pytest.mark.parametrize("name", ["judge", "events", "explain", "report", "repro", "shrink", "diagnose", "recover"])
def test_commands_that_take_it(name: str) -> None:
    """Each command that takes a run directory."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert any(isinstance(one.type, RunFolder) for one in command.params)


def test_a_run_is_told_and_compared(runs: Path) -> None:
    """From end to end, with a recorded run; a shell completes the word."""
    shutil.rmtree(runs / "b")
    shutil.copytree(next(path for path in sorted(RECORDED.iterdir()) if (path / "plan.json").is_file()), runs / "b")
    assert CliRunner().invoke(cli, ["explain", "latest"], catch_exceptions=False).exit_code == 0
    assert CliRunner().invoke(cli, ["compare", "latest", "latest"], catch_exceptions=False).exit_code in (0, 2)
    completed = ShellComplete(cli, {}, "torchaos", "_C").get_completions(["explain"], "la")
    assert "latest" in [one.value for one in completed]


def test_it_says_which_run_it_is(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest run may be of another job with the same scenario's name; the line is no part of the output."""
    (runs / "b" / "plan.json").write_text('{"scenario": "kill-rank", "job": {"cwd": "/other/job"}}')
    os.utime(runs / "b" / "plan.json", (3, 3))
    assert RunFolder()("latest").absolute() == runs / "b"
    assert capsys.readouterr() == ("", f"latest: {runs / 'b'} (kill-rank, job in /other/job)\n")
    (runs / "b" / "plan.json").write_text("{")
    RunFolder()("torchaos-runs/latest")
    assert capsys.readouterr().err == f"torchaos-runs/latest: {runs / 'b'}\n"
