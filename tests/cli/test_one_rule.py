"""Options that several commands have mean the same in all of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from recorded import judged, recorded

from torchaos.harness.cli import cli
from torchaos.harness.cli.commands import ALL
from torchaos.harness.contracts import UsageError

RUN_JOBS = {"run", "init", "explore", "gameday", "gate", "shrink", "bisect"}


def options_of(name: str) -> dict[str, click.Option]:
    command = cli.get_command(click.Context(cli), name)
    assert command
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    return {word: one for one in options for word in one.opts}


@pytest.mark.parametrize("name", ALL)
def test_an_option_means_the_same_everywhere(name: str) -> None:
    """--json needs no value; a command that gives verdicts writes JUnit, and a summary too; one that runs jobs can be
    quiet; -o is --output, which names a file, and --out a folder."""
    found = options_of(name)
    if "--json" in found:
        assert found["--json"].is_flag or found["--json"].flag_value == "-"
    if "--junit" in found:
        assert "--summary" in found
    assert ("--quiet" in found) == (name in RUN_JOBS)
    assert ("-q" in found) == ("--quiet" in found)
    assert found.get("-o") is found.get("--output")
    if "--out" in found and found["--out"] is not found.get("--output"):  # as repro has it, from earlier versions
        assert "folder" in (found["--out"].help or "").lower()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = recorded(tmp_path / "kill")
    judged(folder)
    return folder.root


def test_json_is_all_of_the_output(run_dir: Path, tmp_path: Path) -> None:
    """Without a file, standard output has the JSON and nothing else; the text goes to standard error. With a file, the
    text is where it always is. The exit code is the same."""
    text = CliRunner().invoke(cli, ["judge", str(run_dir)])
    alone = CliRunner().invoke(cli, ["judge", str(run_dir), "--json"])
    file = tmp_path / "all.json"
    beside = CliRunner().invoke(cli, ["judge", str(run_dir), "--json", str(file)])
    assert json.loads(alone.stdout) == json.loads(file.read_text())
    assert (alone.stderr, beside.stdout) == (text.stdout, text.stdout)
    assert text.exit_code == alone.exit_code == beside.exit_code
    assert json.loads(alone.stdout)["results"][0]["exit_code"] == text.exit_code


@pytest.mark.parametrize("command", ["judge", "run", "explore", "gate"])
def test_json_never_writes_over_what_is_meant_to_be_read(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """In `run --json kill.yaml`, the scenario is meant as the scenario."""
    monkeypatch.chdir(tmp_path)
    file = Path("kill.yaml")
    shutil.copy(run_dir / "scenario.yaml", file)
    before = file.read_bytes()
    for word in (str(file), str(run_dir)):
        with pytest.raises(UsageError, match="it would be written over; to print the JSON, write --json as the last"):
            CliRunner().invoke(cli, [command, "--json", word, str(file)], catch_exceptions=False)
    assert file.read_bytes() == before


def test_a_summary_of_what_is_judged_again(run_dir: Path, tmp_path: Path) -> None:
    """As after the run."""
    CliRunner().invoke(cli, ["judge", str(run_dir), "--summary", str(tmp_path / "again.md")])
    CliRunner().invoke(cli, ["report", str(run_dir), "--summary", str(tmp_path / "report.md")])
    assert (tmp_path / "again.md").read_text() == (tmp_path / "report.md").read_text() != ""


def test_an_option_without_effect_is_refused() -> None:
    """Calls are timed only while the kernel is watched."""
    with pytest.raises(UsageError, match="give --kernel SECONDS too"):
        CliRunner().invoke(cli, ["diagnose", "--pid", "1", "--function", "libc:write"], catch_exceptions=False)
