"""Scenarios: which load, and which are refused with one clear error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from malformed import CASES, GOOD, Case
from warm import torchaos

from torchaos.harness.scenario.checks import json_schema
from torchaos.harness.scenario.field_types import fill
from torchaos.harness.scenario.loader import load
from torchaos.harness.scenario.yaml_source import ScenarioError

READY = Path(__file__).parents[2] / "scenarios"
SCENARIOS = sorted(path for path in READY.rglob("*.yaml") if path.parent.name != "gamedays")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_malformed_gives_one_error_with_its_place(case: Case, tmp_path: Path) -> None:
    """Each of these mistakes gives exactly one error, at its place, that names the thing and what to do."""
    assert case.old in GOOD
    path = tmp_path / "scenario.yaml"
    path.write_text(GOOD.replace(case.old, case.new, 1) if case.old else case.new)
    with pytest.raises(ScenarioError) as caught:
        load(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"{path}:{case.at}: ")
    assert all(word in lines[0] for word in case.says), lines[0]


def test_there_are_at_least_fifty_mistakes() -> None:
    """The table of mistakes does not shrink unnoticed."""
    assert len(CASES) >= 50


def test_all_problems_come_at_once_in_order(tmp_path: Path) -> None:
    """Somebody who made three mistakes sees three errors, from top to bottom."""
    path = tmp_path / "scenario.yaml"
    path.write_text(GOOD.replace("seed: 7", "sed: 7").replace("5m", "5").replace("rank: 1", "rank: one"))
    with pytest.raises(ScenarioError) as caught:
        load(path)
    places = [int(re.match(rf"{re.escape(str(path))}:(\d+):", line)[1]) for line in str(caught.value).splitlines()]  # type: ignore[index]
    assert places == sorted(places)
    assert len(places) == 3


def test_the_command_line_says_it_without_a_traceback(tmp_path: Path) -> None:
    """`torchaos run` with a mistake ends with exit code 3 and the error alone, and makes no run directory."""
    path = tmp_path / "scenario.yaml"
    path.write_text(GOOD.replace("process.kill", "process.kil"))
    done = torchaos("run", path, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.strip().endswith("did you mean 'process.kill'?")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_every_ready_scenario_loads(path: Path) -> None:
    """What the library offers is well-formed, and named like its file."""
    assert load(path).scenario == path.stem


def test_set_changes_a_value_and_is_judged_like_the_file(tmp_path: Path) -> None:
    """`--set` reaches any key, also one that the file leaves out, and its mistakes are told as its own."""
    path = tmp_path / "scenario.yaml"
    path.write_text(GOOD)
    changed = load(path, ["job.timeout=2m", "faults.0.when.step=30", "limits.ranks=1"])
    assert (changed.job.timeout, changed.faults[0].when.step, changed.limits.ranks) == (120.0, 30, 1)
    with pytest.raises(ScenarioError, match=r"--set job\.timout: .*did you mean 'timeout'"):
        load(path, ["job.timout=2m"])


def test_placeholders_are_filled_and_braces_kept() -> None:
    """A known placeholder gets its value, one that comes later stays, and a doubled brace is a brace."""
    assert fill("{jobs}/a {run}/b {{c}}", {"jobs": "/j"}) == "/j/a {run}/b {c}"


def test_the_schema_knows_every_plug_in() -> None:
    """An editor is told the names and parameters of all injectors and assertions."""
    schema = json_schema()
    assert "process.kill" in schema["$defs"]["Fault"]["properties"]["inject"]["enum"]
    named = [option["anyOf"][0]["const"] for option in schema["properties"]["assert"]["items"]["anyOf"]]
    assert {"recovery_time", "loss_continuity"} <= set(named)
