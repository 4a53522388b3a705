"""Scenarios that torchaos writes: they are read back unchanged, whatever words a job's command contains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from torchaos.harness.minimize.scenario_shrink import Child, Ran, Shrink
from torchaos.harness.record.result import Case, Result, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.scenario.loader import load
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


SHRINKABLE = """\
scenario: lr
job: {command: [torchrun, --nproc-per-node, "2", train.py, --lr, "1e-3"], env: {WORD: no, OLD: 017, AT: 10:30}}
faults: [{inject: process.kill, target: {rank: 1}, when: {step: 3}}]
twin: none
assert: [recovery_time]
"""


class Keeping(Child):
    """Instead of a run: reads what it was given as a run would, and fails."""

    def run(
        self, scenario: dict[str, Any], home: Path, seed: int, consent: Sequence[str], fds: Sequence[int] = ()
    ) -> Ran:
        home.mkdir(parents=True)
        (home / "scenario.yaml").write_text(dumped(scenario))
        self.seen = load(home / "scenario.yaml")
        return Ran(1, FAILED)


FAILED = Result("lr", "", 0, Verdict.FAILED, 1, "", "", "", 0.0,
                cases=(Case("recovery_time", "assertion", Verdict.FAILED, ""),))  # fmt: skip


def test_what_shrink_tries_is_the_scenario_as_it_was(tmp_path: Path, trainer: Any) -> None:
    """Words that YAML 1.1, or another reader, takes for numbers, booleans and times are the same in every try."""
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    trainer(kills=[(18, 1)]).record().plan.write(run.plan)
    run.scenario.write_text(SHRINKABLE)
    wanted, child = load(run.scenario).job, Keeping()
    task = replace(Shrink.of(run, FAILED, tmp_path / "tries", 1, 1, lambda _text: None), child=child)
    assert task() is not None
    assert (child.seen.job.command, child.seen.job.env) == (wanted.command, wanted.env)
    assert wanted.env == {"WORD": "no", "OLD": "017", "AT": "10:30"}


def test_a_number_is_no_text() -> None:
    """What this file is for: PyYAML alone writes a word that our own reader takes for a number."""
    text = yaml.safe_dump({"value": "1e-3"})
    assert parse(Path("x.yaml"), text).data == {"value": 0.001}
