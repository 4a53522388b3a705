"""Numbers with their nouns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchaos.harness.record.plan import counted
from torchaos.harness.reporting.terminal.narrator import _restart_in_words

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 steps were lost"), (1, "1 step was lost"), (2, "2 steps were lost")]
)
def test_one_is_singular(count: int, said: str) -> None:
    """With its verb."""
    assert f"{counted(count, 'step', 'was/were')} lost" == said


def test_the_last_restart() -> None:
    """The line of a live run, which is read most."""
    assert _restart_in_words(1) == "torchelastic restarts; 1 restart is left"
    assert _restart_in_words(0) == "torchelastic restarts; no restarts are left"
    assert _restart_in_words(None) == "torchelastic restarts"


def test_no_text_says_that_one_are() -> None:
    """A count before a noun in the plural and `are` or `were` is made by `counted`."""
    wrong = re.compile(r"(?<!of )\{[^{}]*\} (restarts|checkpoints|samples|states|faults|steps) (are|were)\b")
    found = [
        f"{path.name}: {one[0]}"
        for folder in ("harness", "assertions", "injectors")
        for path in (REPOSITORY / folder).rglob("*.py")
        for one in wrong.finditer(path.read_text(encoding="utf-8"))
        if path.name != "step_evidence.py"  # its count may be several: 10 or 15
    ]
    assert found == []
