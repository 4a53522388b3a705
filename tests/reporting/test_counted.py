"""Numbers with their nouns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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


_NOUNS = (
    "assertions|attempts|batches|checkpoints|collectives|entries|events|faults|files|folders|iterations|lines|losses|"
    "names|nodes|operations|others|parts|pods|processes|ranks|records|recoveries|repetitions|replicas|restarts|rounds|"
    "runs|samples|scenarios|states|steps|tensors|tries|twins|values"
)
_PLURAL = re.compile(rf" (?:more |new )?(?:{_NOUNS})\b")
_NEAR = re.compile(rf"}}\W*(?:f\W+)?(?:more |new )?(?:{_NOUNS})\b")  # in the source of a text that has one
_ASKS = re.compile(r"[=!]= 1\b|> 1\b|>= 2\b|< 2\b")  # whether there is one
_SEVERAL = (  # counts that are never 1
    "len(new)} runs", "many} rounds", "len(boxes)} parts", "ask.times} repetitions", "len(self._twins)} twins",
    "len(run.history.attempts)} attempts", "EXCHANGED} others", "operations} operations", "_CALM} steps",
    "self._tries} states", "MAX_NODES} values",
)  # fmt: skip


def _counts(function: ast.FunctionDef) -> Iterator[str]:
    """Each count before a noun in the plural in the texts of a function, but for `2 of {count} ranks`."""
    for text in ast.walk(function):
        parts = text.values if isinstance(text, ast.JoinedStr) else []
        for before, count, after in zip([None, *parts], parts, parts[1:], strict=False):
            share = isinstance(before, ast.Constant) and str(before.value).endswith("of ")
            plural = isinstance(after, ast.Constant) and _PLURAL.match(str(after.value))
            if isinstance(count, ast.FormattedValue) and isinstance(after, ast.Constant) and plural and not share:
                yield f"{{{ast.unparse(count.value)}}}{after.value!s}"


def test_no_text_says_1_steps() -> None:
    """A count before a noun in the plural is made by `counted`, or its function asks whether there is one."""
    found = [
        f"{path.name}: {text}"
        for folder in ("harness", "assertions", "injectors")
        for path in (REPOSITORY / folder).rglob("*.py")
        if _NEAR.search(source := path.read_text(encoding="utf-8"))
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for text in _counts(function)
        if not text.startswith(tuple(f"{{{one}" for one in _SEVERAL)) and not _ASKS.search(ast.unparse(function))
    ]
    assert found == []


def test_no_text_of_a_recorded_run_says_1_steps() -> None:
    """Stories and pages of recorded runs, and the documentation: one is singular, also its verb."""
    singular = "|".join(noun[:-1] for noun in _NOUNS.split("|") if not noun.endswith(("ies", "sses")))
    wrong = re.compile(rf"(?<![\d.,:/-])1 (?:more |new )?(?:{_NOUNS})\b|\b1 (?:{singular}) (?:are|were|have|do)\b")
    told = [*(REPOSITORY / "tests").glob("*/golden/*"), *(REPOSITORY / "docs").glob("*.md")]
    assert len(told) > 20
    found = [f"{path.name}: {one[0]}" for path in told for one in wrong.finditer(path.read_text(encoding="utf-8"))]
    assert found == []
