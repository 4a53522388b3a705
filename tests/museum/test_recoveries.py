"""lab/museum/recoveries.py: the table of deaths and damages. Nothing is run here."""

from __future__ import annotations

import marks
import pytest
import recoveries
from recoveries import CELLS, FRAMEWORKS, ROOT, Told

from torchaos.harness import registry
from torchaos.harness.scenario.loader import load


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", CELLS)
def test_a_column_is_a_ready_scenario(name: str, framework: str) -> None:
    """With the changes for each framework, it loads."""
    cell = CELLS[name]
    assert load(registry.find_scenario(cell.scenario), recoveries.changes(FRAMEWORKS[framework], cell)).faults


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda framework: framework.name)
def test_a_row_has_a_trainer(framework: recoveries.Framework) -> None:
    """Its command names a file that exists, and the folder that the scenarios read."""
    command = recoveries.command(framework, CELLS["epoch-end"])
    assert (ROOT / "tests" / "trainers" / framework.trainer).is_file()
    assert command[-4:] == ["--dir", "{run}/checkpoints", "--save-every", "16"]


@pytest.mark.parametrize(
    ("verdict", "failed", "words"),
    [
        ("passed", [], "right"),
        ("inconclusive", [], "no verdict"),
        ("failed", ["completed", "restarts"], "**stays down**"),
        ("failed", ["loss_continuity", "sample_accounting"], "**wrong**: losses, samples"),
    ],
)
def test_what_a_cell_says(verdict: str, failed: list[str], words: str) -> None:
    """A job that did not come back, and a job that came back wrong, are told apart."""
    assert recoveries.in_words(Told("plain", "save", "torch 2", verdict, "why", failed)) == words


def test_the_table_has_what_was_run() -> None:
    """A framework without a result has no row, and a cell without a result says so."""
    told = Told("ignite", "second", "pytorch-ignite 1", "failed", "why < not", ["loss_continuity"])
    head, _rule, row, _gap, note = recoveries.table({("ignite", "second"): told})
    assert head.count("|") == row.count("|") == len(CELLS) + 2
    assert row.startswith("| pytorch-ignite 1 (`ignite`) | not run |")
    assert row.count("not run") == len(CELLS) - 1
    assert note == "- ignite, second: why &lt; not"


def test_the_pages_have_what_was_kept() -> None:
    """Both tables, with reasons and without, are those of the results that are kept."""
    lines = recoveries.table(recoveries.read(recoveries.KEPT))
    raw = (ROOT / "lab" / "results" / "recoveries.md").read_text()
    page = (ROOT / "docs" / "measured" / "what-trainers-lose.md").read_text()
    assert marks.between(raw, "recoveries") == "\n" + "\n".join(lines) + "\n"
    assert marks.between(page, "cells") == "\n" + "\n".join(lines[: lines.index("")]) + "\n"
