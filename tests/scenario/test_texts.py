"""Numbers where text is wanted: what the user wrote arrives, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from malformed import GOOD

from torchaos.harness.release.gate_file import load as load_gate
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.loader import job_in, load, text_of
from torchaos.harness.scenario.yaml_source import ScenarioError

WRITTEN = ["1", "25", "1e5", "3e-4", "08", "007", "true", "True", "FALSE", "y", "no", "1.10", "0x10", "1_000", "-0",
           ".5", "+1", "2026-01-02", "10:30", ".inf", "123456789012345678901234567890"]  # fmt: skip
TYPED = ["", "null", "~", "a: b", "[1", "[1, 2]", "{run}/x", "a #b", "*", "&a", "%d", "@x", "a=b", "- x", " x"]


def scenario(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    path, text = tmp_path / "scenario.yaml", GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", WRITTEN)
def test_a_value_of_env_is_what_was_written(tmp_path: Path, text: str) -> None:
    """In the file, on the command line, in a mapping on the command line, and after the job went into another file."""
    there = scenario(tmp_path, ("  timeout: 5m", f"  env: {{X: {text}}}"))
    assert load(there).job.env == {"X": text}
    into = tmp_path / "into.yaml"
    into.write_bytes(text_of(there, job_in(there)))
    assert load(into).job.env == {"X": text}
    plain = scenario(tmp_path)
    assert load(plain, [f"job.env.X={text}"]).job.env == {"X": text}
    assert load(plain, [f"job.env={{X: {text}}}"]).job.env == {"X": text}


@pytest.mark.parametrize("text", [*WRITTEN, *TYPED])
def test_a_value_of_env_on_the_command_line_needs_no_quotes(tmp_path: Path, text: str) -> None:
    """A shell has taken the quotes away already. Quotes that it has left are YAML's."""
    plain = scenario(tmp_path)
    assert load(plain, [f"job.env.X={text}"]).job.env == {"X": text}
    assert load(plain, [f"job.env.X='{text}'"]).job.env == {"X": text}


@pytest.mark.parametrize("text", ["1e5", "2026", "true", "1.10"])
def test_other_texts_are_what_was_written(tmp_path: Path, text: str) -> None:
    """Descriptions, tags, words of a command, parameters of plug-ins."""

    def texts(found: Scenario) -> list[object]:
        return [
            found.description,
            found.tags[0],
            found.job.command[-1],
            found.faults[0].id,
            found.stop[0].params["run"],
        ]

    fails = f"{{command_fails: {{run: [{text}]}}}}"
    command = "torchrun --nproc-per-node 2 {jobs}/gpt_ddp.py --checkpoint-dir {run}/checkpoints"
    named = scenario(
        tmp_path, ("One rank dies.", text), ("seed: 7", f"tags: [{text}]\nstop: [{fails}]"),
        (command, f"[torchrun, x.py, {text}]"), ("process.kill", f"process.kill\n    id: {text}"),
    )  # fmt: skip
    assert texts(load(named)) == [text] * 4 + [[text]]
    sets = [f"description={text}", f"tags=[{text}]", f"job.command=[{text}]", f"stop=[{fails}]", f"faults.0.id={text}"]
    assert texts(load(scenario(tmp_path), sets)) == [text] * 4 + [[text]]


def test_a_number_stays_a_number(tmp_path: Path) -> None:
    """Text where a number is wanted is a mistake, with or without --set."""
    assert load(scenario(tmp_path), ["seed=8", "faults.0.when.step=30"]).seed == 8
    with pytest.raises(ScenarioError, match=r"--set seed: seed is a whole number, not '8x'"):
        load(scenario(tmp_path), ["seed=8x"])
    with pytest.raises(ScenarioError, match=r"--set seed: seed is a whole number, not '\[8'"):
        load(scenario(tmp_path), ["seed=[8"])


def test_the_versions_of_a_gate_and_its_tickets_are_text(tmp_path: Path) -> None:
    """2.10 is another version than 2.1."""
    scenario(tmp_path)
    gate = tmp_path / "gate.yaml"
    gate.write_text(
        "gate: g\nscenarios: [scenario.yaml]\nmax_age: 1d\nenvironments: {ci: {versions: {torch: 2.10}}}\n"
        "waivers: [{scenario: kill-rank, assertion: recovery_time, reason: slow, ticket: 0123, expires: 2030-01-01}]\n"
    )
    found = load_gate(gate).gate
    assert found.environments["ci"].versions == {"torch": "2.10"}
    assert found.waivers[0].ticket == "0123"
