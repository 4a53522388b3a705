"""The table of all sentences that name a cause, an agreement or a restoration."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from torchaos.harness.analysis.claims import CLAIMS

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "harness/analysis/claims.py"
# Words by which such a sentence is known, and what has them without being one.
NAMES_A_CAUSE = re.compile(r"(?i)most likely|not restored|were restored|was restored|as if |rewound|starts? over")
BARE = {"parameter_digest checks what was restored", "so nothing was restored"}


@cache
def _sources() -> dict[Path, ast.Module]:
    paths = [path for folder in ("harness/analysis", "assertions") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text()) for path in paths if path != TABLE}


def _texts(tree: ast.Module) -> Iterator[str]:
    """The text constants of a module, without docstrings."""
    aside = {
        id(statement.value)
        for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        for statement in node.body if isinstance(statement, ast.Expr)
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in aside:
            yield node.value


def test_each_claim_is_used_and_each_use_is_in_the_table() -> None:
    """A sentence that nobody says has no place in it."""
    texts = {text for tree in _sources().values() for text in _texts(tree)}
    assert CLAIMS.keys() - texts == set()
    said = [
        node for tree in _sources().values() for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "said"
    ]  # fmt: skip
    keys = {node.value for call in said for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant)}
    assert {key for key in keys if isinstance(key, str)} <= CLAIMS.keys() | {"schedule"}
    assert all(claim.record for claim in CLAIMS.values())


def test_no_cause_is_named_outside_of_the_table() -> None:
    """What was not restored, and what is most likely, is said by the table alone."""
    found = [text for tree in _sources().values() for text in _texts(tree) if NAMES_A_CAUSE.search(text)]
    assert [text for text in found if text not in CLAIMS and not any(bare in text for bare in BARE)] == []


@cache
def _tests() -> str:
    own = Path(__file__)
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path != own]
    strings = (node.value for path in files for node in ast.walk(ast.parse(path.read_text()))
               if isinstance(node, ast.Constant) and isinstance(node.value, str))  # fmt: skip
    return "\n".join(strings)


@pytest.mark.parametrize("claim", CLAIMS)
def test_each_claim_is_expected_by_a_test(claim: str) -> None:
    """Some four words in a row of it, or all of it, are in a test that expects them."""
    parts = [part.strip(" .:;,") for part in re.split(r"\{[^}]*\}", CLAIMS[claim].words)]
    rows = [part.split() for part in parts if part]
    runs = [" ".join(row[at : at + 4]) for row in rows for at in range(max(len(row) - 3, 1))]
    longest = max(map(len, rows), default=0)
    wanted = [run for run in runs if len(run.split()) >= min(4, longest)]
    assert any(run in _tests() for run in wanted), wanted
