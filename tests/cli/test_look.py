"""The commands that only look: validate for each kind of file, the schemas, and doctor's exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from click.testing import CliRunner

from torchaos.harness import registry
from torchaos.harness.cli import cli
from torchaos.harness.interfaces import UsageError
from torchaos.harness.running import capabilities

REPOSITORY = Path(__file__).parents[2]
DAYS = sorted((REPOSITORY / "scenarios" / "gamedays").glob("*.yaml"))
GATE = REPOSITORY / "ci" / "templates" / "release-gate" / "gate.yaml"


@pytest.mark.parametrize("file", [*DAYS, GATE], ids=lambda path: path.stem)
def test_game_days_and_gates_are_validated(file: Path, tmp_path: Path) -> None:
    """Each is checked by its own grammar, and a mistake in it is told with its place."""
    done = CliRunner().invoke(cli, ["validate", str(file)])
    assert (done.exit_code, done.output) == (0, f"{file}: well-formed\n")
    bad = tmp_path / "bad.yaml"
    bad.write_text(file.read_text() + "\nno_such_key: 1\n")
    done = CliRunner().invoke(cli, ["validate", str(bad)])
    assert isinstance(done.exception, UsageError)
    assert f"{bad}:{len(bad.read_text().splitlines())}:1: unknown key 'no_such_key'" in str(done.exception)


@pytest.mark.parametrize(("kind", "files"), [("gameday", DAYS), ("gate", [GATE])])
def test_each_kind_has_a_schema(kind: str, files: list[Path]) -> None:
    """The files of the repository fit it, and a file with an unknown key does not."""
    schema = json.loads(CliRunner().invoke(cli, ["schema", kind]).output)
    assert schema["$id"].endswith(f"/{kind}.json")
    checker = jsonschema.Draft202012Validator(schema)
    for file in files:
        data = json.loads(json.dumps(yaml.safe_load(file.read_text()), default=str))  # editors read dates as text
        assert not list(checker.iter_errors(data)), file
        assert list(checker.iter_errors({**data, "no_such_key": 1})), file


def test_the_scenario_is_the_usual_kind() -> None:
    """Without a kind, the schema is that of scenarios, with a name of its own."""
    schema = json.loads(CliRunner().invoke(cli, ["schema"]).output)
    assert list(schema)[:2] == ["$schema", "$id"]
    assert schema["$id"].endswith("/scenario.json")
    assert "faults" in schema["properties"]


@pytest.mark.parametrize(("lacking", "code", "words"), [
    ((), 0, "Scenarios can run."),
    (("docker", "root"), 0, "Scenarios can run, except those that need what is missing."),
    (("docker", "torchrun"), 3, "No scenario can run without torchrun."),
])  # fmt: skip
def test_only_what_every_scenario_needs_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, lacking: tuple[str, ...], code: int, words: str
) -> None:
    """A part that some scenarios need may be missing; torchrun may not."""
    one = capabilities.check("proc")
    monkeypatch.setattr(capabilities, "check", lambda name: replace(one, name=name, present=name not in lacking))
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == code
    assert words in done.output
    assert done.output.partition("\n\n")[0].count("missing  ") == len(lacking)


def test_doctor_has_a_line_for_each_family_of_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts the faults that this machine can inject, and names what the others lack; --json has the same. In short,
    the families and parts that lack nothing share a line."""
    one = capabilities.check("proc")
    monkeypatch.setattr(capabilities, "check", lambda name: replace(one, name=name, present=name != "fuse"))
    brief = CliRunner().invoke(cli, ["doctor"]).output
    assert [line.split()[:2] for line in brief.splitlines() if line.startswith("missing")] == [["missing", "fuse"]]
    assert len(brief.splitlines()) == 8
    whole = CliRunner().invoke(cli, ["doctor", "-v"]).output
    lines = {line.split()[1]: line for line in whole.splitlines() if "  " in line}
    assert " of " in lines["process"]
    assert "lack" not in lines["process"]
    assert lines["storage"].startswith("ok")
    assert lines["storage"].endswith("lack fuse")
    told = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).output)
    assert told["faults"]["process"]["process.kill"] == []
    assert told["faults"]["storage"]["storage.stall"] == ["fuse"]
    assert [part["name"] for part in told["parts"] if not part["present"]] == ["fuse"]


def test_json_is_a_flag_of_what_only_looks(tmp_path: Path) -> None:
    """list, validate, explain and compare print JSON, with the same exit code."""
    runs = Path(__file__).parents[1] / "data" / "runs"
    bad = tmp_path / "bad.yaml"
    bad.write_text("scenario: bad\n")
    asked = {
        ("list", "assertions"): 0, ("validate", str(bad)): 3, ("explain", str(runs / "kill")): 0,
        ("compare", str(runs / "kill"), str(runs / "kill-twice")): None,
    }  # fmt: skip
    told = {}
    for words, code in asked.items():
        done = CliRunner().invoke(cli, [*words, "--json"])
        told[words[0]] = json.loads(done.output)
        assert code in (None, done.exit_code)
    assert "completed" in told["list"]["assertions"]
    assert "job" in told["validate"][0]["mistakes"]
    assert told["explain"]["title"].startswith("kill")
    assert {row["change"] for row in told["compare"]} == {"new", "unclear"}


def test_the_list_is_short() -> None:
    """How many there are; a line for each part of a kind; one in full by its name, and a mistyped name gets a hint."""
    lines = CliRunner().invoke(cli, ["list", "assertions"]).output.split("Assertions")[1].strip().splitlines()
    assert len(lines) == len(registry.names("assertions"))
    scenarios = CliRunner().invoke(cli, ["list", "scenarios"]).output.strip().splitlines()
    assert len([line for line in scenarios if line]) == 2 + len(registry.scenario_names())
    whole = CliRunner().invoke(cli, ["list", "-v"]).output
    short = CliRunner().invoke(cli, ["list"]).output
    assert len(short.splitlines()) < 24 < 200 < len(whole.splitlines())
    assert f"{len(registry.names('injectors'))}: " in short
    one = CliRunner().invoke(cli, ["list", "recovery_time"]).output
    assert "catch_up" in one
    assert "loss_continuity" not in one
    with pytest.raises(UsageError, match=r"did you mean 'process\.kill'"):
        CliRunner().invoke(cli, ["list", "proces.kill"], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["schema", "list", "doctor", "plan process/kill-rank"])
def test_a_reader_that_goes_away(command: str) -> None:
    """The exit code is that of SIGPIPE, and not 1, which would mean that an assertion failed."""
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "torchaos.harness", *command.split()]
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
