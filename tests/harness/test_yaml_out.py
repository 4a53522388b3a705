"""Scenarios that torchaos writes itself: what it reads back is what it wrote, whatever words a job's command holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from torchaos.harness.gameday.shrink import Shrink
from torchaos.harness.result import Case, Result, Verdict
from torchaos.harness.rundir import RunDir
from torchaos.harness.scenario import load
from torchaos.harness.scenario.yaml_source import dumped, parse

WORDS = st.sampled_from(["1e-3", "1E5", "5e1", ".5", "017", "0x1f", "1_000", "yes", "on", "null", "~", "10:30", "true",
                         "2026-01-01", "=", "<<", "", "-", "? a", "a: b", "#", "'", '"', "{run}/x", "&a", "*a", "!t",
                         "%d", "line\nbreak", " edge ", "\x85", "é"])  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**16), 10**16)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
    | st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abcde"), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_is_written_is_read(value: Any) -> None:
    """Numbers stay numbers and text stays text, where YAML 1.1 and 1.2 differ too."""
    assert parse(Path("x.yaml"), dumped({"value": value})).data == {"value": value}


def test_the_same_thing_twice_is_written_twice() -> None:
    """An alias would be one value to whoever edits the file."""
    shared = ["a"]
    assert "&" not in dumped({"one": shared, "two": shared})


@pytest.mark.parametrize("word", ["1e-3", "no", "017"])
def test_a_run_whose_command_has_such_words_can_be_shrunk(word: str, tmp_path: Path, trainer: Any) -> None:
    """`--lr 1e-3` is a word of the command, before and after: what shrink tries is the scenario as it was."""
    path = tmp_path / "lr.yaml"
    command = ["torchrun", "--nproc-per-node", "2", "train.py", "--lr", word]
    whole = {"scenario": "lr", "job": {"command": command, "env": {"WORD": word}}, "twin": "none",
             "faults": [{"inject": "process.kill", "target": {"rank": 1}, "when": {"step": 3}}],
             "assert": ["recovery_time"]}  # fmt: skip
    path.write_text(dumped(whole))
    assert list(load(path).job.command)[-1] == word
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    trainer(kills=[(18, 1)]).record().plan.write(run.plan)
    run.scenario.write_text(path.read_text())
    case = Case("recovery_time", "assertion", Verdict.FAILED, "")
    result = Result("lr", "", 0, Verdict.FAILED, 1, "", str(run.root), "", 0.0, cases=(case,))
    task = Shrink.of(run, result, tmp_path / "tries", 1, 1, lambda _text: None)
    assert task.scenario["job"] == whole["job"]


def test_a_number_is_no_text() -> None:
    """What this file is for: PyYAML alone writes a word that our own reader takes for a number."""
    text = yaml.safe_dump({"value": "1e-3"})
    assert parse(Path("x.yaml"), text).data == {"value": 0.001}
