"""The table of the field's systems (lab/systems.yaml): all that it names is there, and its page is what it says."""

from __future__ import annotations

import ast
import runpy
import subprocess
from pathlib import Path
from typing import Any

import marks
import oracle
import pytest
import teeth
import yaml

PROGRAM = runpy.run_path(str(teeth.REPOSITORY / "lab" / "systems.py"))
ROWS: list[Any] = PROGRAM["systems"]()
BENCH = {trainer.name: trainer for trainer in oracle.table()}


def test_there_are_78_rows() -> None:
    """They are numbered from 1 on, and each is called otherwise."""
    assert [row.number for row in ROWS] == list(range(1, 79))
    assert len({row.system for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[str(row.number) for row in ROWS])
def test_all_that_a_row_names_is_there(row: Any) -> None:
    """A system that works has something that shows it, and one that does not has what is missing. Each assertion is
    one that a scenario or a trainer of the row is judged by."""
    assert row.state in ("works", "partly", "missing")
    assert bool(row.lacks) == (row.state != "works")
    assert row.scenarios or row.bench or row.tests or row.state != "works"
    judged = {name for trainer in row.bench for name in BENCH[trainer].asserts}
    for name in row.scenarios:
        scenario = yaml.safe_load((teeth.SCENARIOS / f"{name}.yaml").read_text())
        judged |= {one if isinstance(one, str) else next(iter(one)) for one in scenario["assert"]}
    assert set(row.asserts) <= judged
    for test in row.tests:
        file, _, function = test.partition("::")
        path = teeth.REPOSITORY / file
        assert path.name.startswith("test_")
        assert not function or function in functions(path), test


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_the_page_is_the_table() -> None:
    """It has the rows of today. When each scenario was last run is read from another page."""
    text = (teeth.REPOSITORY / "lab" / "results" / "systems.md").read_text()
    lines = [line for line in marks.between(text, "systems").splitlines() if line.startswith("| ")]
    table = PROGRAM["table"](ROWS, PROGRAM["tested_on"](text), {})
    for written, line in zip(lines, (line for line in table.splitlines() if line.startswith("| ")), strict=True):
        assert kept(written) == kept(line)


def kept(line: str) -> list[str]:
    """The cells of a row. Of the cell that tells the runs, only the names are kept."""
    cells = [cell.strip() for cell in line.split("|")]
    cells[5] = " ".join(word for word in cells[5].replace(";", " ").split() if word.startswith("`"))
    return [cell.replace(":", "") if place == 5 else cell for place, cell in enumerate(cells)]


def test_a_verdict_is_that_of_the_page_of_teeth() -> None:
    """A scenario that was not run says so, and one with a defect that was found tells it."""
    try:
        ran = PROGRAM["verdicts"]()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs git, and a clone of the repository that git may read: {error}")
    assert set(ran) <= set(teeth.names())
    assert ran["process/kill-rank"].startswith("passed 20")
    assert ran["process/kill-rank"].endswith("its defect failed")


def test_the_result_of_tests_stays_on_the_page() -> None:
    """A row whose tests were not run again keeps what the page says of them."""
    table = PROGRAM["table"](ROWS, {2: "its tests passed 2026-01-02"}, {})
    assert "its tests passed 2026-01-02" in table
    assert PROGRAM["tested_on"](f"<!-- systems: begin -->\n{table}\n<!-- systems: end -->") == {
        2: "its tests passed 2026-01-02"
    }
