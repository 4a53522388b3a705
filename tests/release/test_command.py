"""`torchaos gate` as a CI job calls it: its exit code, output, JUnit and JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from junitparser import Error, Failure, JUnitXml
from warm import torchaos
from webhooks import Server

from torchaos.harness.cli import cli
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.result import ExitCode

from .conftest import Release, change_json

TEMPLATE = Path(__file__).parents[2] / "ci" / "templates" / "release-gate"
EXPIRES = re.compile(r"expires: \S+")


def gate(cwd: Path, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return torchaos("gate", *words, cwd=cwd, env={"PATH": programs, "COLUMNS": "80", **env})


def gate_here(release: Release, runs: str, *words: str) -> tuple[int, str, JUnitXml]:
    """In this process: exit code, what was printed, and the JUnit file."""
    report = release.home / "gate.xml"
    words = (str(release.file), str(release.home / runs), "--junit", str(report), *words)
    done = CliRunner().invoke(cli, ["gate", *words])
    return done.exit_code, done.output, JUnitXml.fromfile(str(report))


def freshen(release: Release) -> None:
    """All runs began just now, by the clock that the command reads."""
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    for path in release.runs.rglob("result.json"):
        change_json(path, lambda result: result.update(started=began))


def test_open(release: Release) -> None:
    """Exit code 0; the screen fits its 80 columns but for paths; in JUnit each assertion is a case that passed."""
    freshen(release)
    done = gate(release.home, release.file, "runs", "--junit", "gate.xml", "--json", "gate.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "OPEN  release, ci" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "files" not in line) <= 80
    cases = [case for suite in JUnitXml.fromfile(str(release.home / "gate.xml")) for case in suite]
    assert {"faults", "recovery_time", "completed", "rollback"} <= {case.name for case in cases}
    assert not any(case.result for case in cases)
    assert JUnitXml.fromfile(str(release.home / "gate.xml")).name == "gate release, ci"
    assert json.loads((release.home / "gate.json").read_text())["results"][0]["verdict"] == "passed"


def test_closed(release: Release, failing: Release) -> None:
    """Exit code 1; a failure that is not waived, a scenario without a run and a waiver of what passes are failures in
    JUnit, and what is waived says so in the name of its case."""
    shutil.copytree(failing.runs, release.runs, dirs_exist_ok=True)
    for name in ("forgets-optimizer", "kill-twice"):
        release.scenario(name)
    for folder in release.runs.glob("forgets-*"):
        shutil.copy(release.home / "scenarios" / "forgets-optimizer.yaml", folder / "scenario.yaml")
    release.waive("forgets-optimizer", "loss_continuity")
    release.waive("kill", "restarts")
    freshen(release)
    code, said, report = gate_here(release, "runs", "--env", "ci")
    assert code == 1
    assert "CLOSED" in said
    cases = [case for suite in report for case in suite]
    red = {(case.classname, case.name) for case in cases if any(isinstance(one, Failure) for one in case.result)}
    assert red == {
        ("forgets-optimizer", "checkpoint_integrity"), ("kill-twice", "result"), ("waivers", "kill: restarts")
    }  # fmt: skip
    assert ("forgets-optimizer", "loss_continuity, waived") in {(case.classname, case.name) for case in cases}


def test_inconclusive(tmp_path: Path) -> None:
    """A run that is no evidence closes the gate with exit code 2, and is an error in JUnit."""
    release = Release(tmp_path / "release")
    release.scenario("missed")
    release.run("missed")
    freshen(release)
    code, _, report = gate_here(release, "runs")
    assert code == 2
    assert any(isinstance(one, Error) for suite in report for case in suite for one in case.result)


@pytest.mark.parametrize(("words", "said"), [
    ([], "the gate has several environments; name one with --env: ci, staging"),
    (["--env", "stagin"], "--env stagin: the gate has no such environment; did you mean 'staging'?"),
    (["--env", "nightly"], "--env nightly: the gate has no such environment; it has ci, staging"),
])  # fmt: skip
def test_environments(release: Release, words: list[str], said: str) -> None:
    """Of several one must be named; a wrong name is answered with the right ones."""
    release.gate["environments"] = {"ci": {}, "staging": {}}
    done = CliRunner().invoke(cli, ["gate", str(release.file), *words])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == said


@pytest.mark.parametrize("commit", ["", "main", "4f2c8", "4F2C81A"])
def test_what_is_no_commit_is_refused(release: Release, commit: str) -> None:
    """Above all the empty text that an unset variable leaves: with it no run would be asked for its commit."""
    done = CliRunner().invoke(cli, ["gate", str(release.file), "--commit", commit])
    assert isinstance(done.exception, UsageError)
    assert "this is no commit" in str(done.exception)


def test_bad_usage(release: Release) -> None:
    """Exit code 3, and a message with the place and what to do."""
    release.gate["waivers"] = [{"scenario": "kill"}]
    done = gate(release.home, release.file)
    assert done.returncode == 3
    assert f"{release.file}:8:3: the key 'ticket' is missing; add it" in done.stderr
    assert "Traceback" not in done.stderr


def test_artifacts_that_never_came(release: Release) -> None:
    """A folder that is not there is no reason for a gate without a report: each scenario lacks its run."""
    code, said, report = gate_here(release, "artifacts")
    assert code == 1
    assert "artifacts: there is no such folder" in said
    assert report.failures == 1


@pytest.mark.job
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_example_runs_what_is_missing(tmp_path: Path) -> None:
    """The example, copied: one command runs its three scenarios and opens the gate, with one assertion waived; a second
    call runs nothing; and once the waiver is taken out, it is closed by what was waived."""
    home = shutil.copytree(TEMPLATE, tmp_path / "release-gate")
    path = home / "gate.yaml"
    path.write_text(EXPIRES.sub(f"expires: {datetime.now(timezone.utc).date()}", path.read_text()))
    done = gate(home, "gate.yaml", "--env", "ci", "--run", "--junit", "gate.xml", XDG_CACHE_HOME=str(tmp_path / "c"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no lost work, waived" in done.stdout
    assert len(list((home / "torchaos-runs").iterdir())) == 3
    assert JUnitXml.fromfile(str(home / "gate.xml")).failures == 0
    assert gate(home, "gate.yaml", "--env", "ci", "--run").returncode == 0
    assert len(list((home / "torchaos-runs").iterdir())) == 3
    text = path.read_text()
    path.write_text(text[: text.index("waivers:")])
    done = gate(home, "gate.yaml", "torchaos-runs", "--env", "ci")
    assert done.returncode == 1
    assert "no lost work: " in done.stdout


def test_short_and_whole(release: Release) -> None:
    """A scenario that passed is one line; with -v its values and bounds are there too."""
    freshen(release)
    short, whole = (gate(release.home, release.file, "runs", *more).stdout for more in ((), ("-v",)))
    assert [line.strip() for line in short.splitlines() if line.strip()][1:] == ["✔ kill"]
    assert "exit code 0 after step 12" not in short
    assert "exit code 0 after step 12" in whole


def test_a_failure_that_follows_from_a_waived_one_is_told_so(failing: Release) -> None:
    """The reader has waived the cause, and learns why the gate is still closed."""
    failing.waive("forgets-optimizer", "loss_continuity")
    failing.scenario("forgets-optimizer")
    freshen(failing)

    def link(result: Any) -> None:
        for case in result["cases"]:
            case["follows"] = "loss_continuity" if case["name"] == "checkpoint_integrity" else None

    for path in failing.runs.rglob("result.json"):
        change_json(path, link)
    for more in ((), ("-v",)):
        done = gate(failing.home, failing.file, "runs", *more)
        assert done.returncode == 1
        assert "it follows from loss_continuity, which is waived" in " ".join(done.stdout.split())

    def more_follow(result: Any) -> None:
        for case in result["cases"]:
            if case["name"] in ("restarts", "completed"):
                case.update(verdict="failed", follows="loss_continuity")

    for path in failing.runs.rglob("result.json"):
        change_json(path, more_follow)
    said = " ".join(gate(failing.home, failing.file, "runs").stdout.split())
    every = "waive checkpoint_integrity, restarts and completed too"
    assert f"3 of these follow from loss_continuity, which is waived: {every}" in said
    failing.waive("forgets-optimizer", "restarts", expires="2026-01-31")
    said = " ".join(gate(failing.home, failing.file, "runs").stdout.split())
    assert "expired on 2026-01-31" in said
    assert (
        "2 of these follow from loss_continuity, which is waived: waive checkpoint_integrity and completed too" in said
    )


def test_the_webhook_is_told(failing: Release, server: Server) -> None:
    """With --webhook, the verdict and what did not pass go to the server; a server that refuses changes no verdict."""
    code, _, _ = gate_here(failing, "runs")
    told_code, output, _ = gate_here(failing, "runs", "--webhook", server.url)
    assert told_code == code
    (body,) = server.bodies
    assert (body["kind"], body["name"], body["verdict"]) == ("gate", "release (ci)", ExitCode(code).verdict.value)
    assert body["why"]
    assert "torchaos gate release (ci)" in body["text"]
    assert server.url not in output
    server.answer = 500
    assert gate_here(failing, "runs", "--webhook", server.url)[0] == code
