"""The museum of real bugs in lab/museum: its rows are complete, and its table shows the results. `python lab/museum`
runs all of it."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import environments
import marks
import museum
import museum_page
import oracle
import pytest
import sides
from museum import Bug
from sides import Told

from torchaos.harness import registry
from torchaos.harness.interfaces import UsageError
from torchaos.harness.minimize.package_bisect import Packages
from torchaos.harness.scenario.loader import load
from torchaos.harness.scenario.yaml_source import dumped

ROWS = museum.rows()
BUG = next(bug for bug in ROWS if bug.name == "accelerate-3556")
ROOT = Path(museum.HERE).parents[1]
PAGE = ROOT / "lab" / "results" / "museum.md"


@pytest.fixture(scope="session")
def package_index() -> None:
    """Skips the tests that need it if no release of a package can be had."""
    try:
        Packages().releases("pip")
    except UsageError as error:
        pytest.skip(f"no package index can be reached: {error}")


def told(bug: Bug, side: museum.Side, verdict: str, *failed: str, **more: object) -> Told:
    """What came of a side that was never run."""
    cases = dict.fromkeys(failed, "failed")
    one = Told(bug.name, side, side == "affected", "", (), verdict, "why", cases, dict.fromkeys(failed, "why"))
    return replace(one, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("bug", ROWS, ids=lambda bug: bug.name)
def test_a_row_is_whole(bug: Bug, tmp_path: Path) -> None:
    """Two versions of the same packages, a public report, a trainer that says what it is, and a scenario that loads for
    both sides."""
    assert bug.affected.keys() == bug.fixed.keys()
    assert bug.affected != bug.fixed
    assert bug.report.startswith("https://github.com/")
    assert bug.report.rsplit("/", 1)[1] == bug.name.rsplit("-", 1)[1], "a row is called by its project and number"
    assert all("==" in package for package in bug.beside)
    assert len(ast.get_docstring(ast.parse(bug.script.read_text())) or "") > 40
    for name in (bug.failed, *bug.still):
        assert registry.find("assertions", name)
    for side in museum.SIDES:
        job = bug.job(side, "packages")
        file = tmp_path / f"{side}.yaml"
        file.write_text(dumped(oracle.scenario(job, oracle.shot(job, 0))))
        assert load(file).job.env["PYTHONPATH"].startswith("packages:")


def test_there_are_rows_of_many_projects() -> None:
    """At least 43 bugs of 15 projects."""
    assert len(ROWS) >= 43
    assert len({bug.project for bug in ROWS}) >= 15


def test_a_row_with_a_mistake_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the file, and the key that is unknown or lacks."""
    (tmp_path / "rows").mkdir()
    monkeypatch.setattr(museum, "HERE", tmp_path)
    row = tmp_path / "rows" / "x-1.yaml"
    row.write_text("projcet: x\n")
    with pytest.raises(ValueError, match=r"x-1\.yaml: unknown keys \['projcet'\]"):
        museum.rows()
    row.write_text("project: x\n")
    with pytest.raises(ValueError, match=r"x-1\.yaml: .*'report'"):
        museum.rows()


def test_sides_that_need_the_same_share_a_folder() -> None:
    """What stands beside both versions is installed once."""
    bug = replace(BUG, beside=("b==2", "a==1"))
    affected, fixed = bug.packages("affected"), bug.packages("fixed")
    assert affected[1] == fixed[1] == ["a==1", "b==2"]
    assert affected[0] != fixed[0]


def test_six_rows_are_among_the_long_tests() -> None:
    """Fast ones, each of another project."""
    long = [bug for bug in ROWS if bug.long]
    assert len(long) == len({bug.project for bug in long}) == 6


def test_where_two_runs_differ() -> None:
    """The first entry that differs, or their lengths; nothing if they are equal."""
    assert sides.difference([1, 2], [1, 2]) == ""
    assert sides.difference([1, 2], [1, 3]) == "entry 2 of 2: 3 instead of 2"
    assert sides.difference([1, 2], [1]) == "1 entries instead of 2"


def test_what_is_right() -> None:
    """The affected side must fail by the named assertion; the fixed side must pass, or fail by what the row and plain
    code both say must fail."""
    assert told(BUG, "affected", "failed", BUG.failed).is_right(BUG)
    assert not told(BUG, "affected", "failed", "completed").is_right(BUG)
    assert not told(BUG, "affected", "inconclusive").is_right(BUG)
    assert not told(BUG, "affected", "inconclusive", BUG.failed).is_right(BUG)
    plain = replace(BUG, still={})
    assert told(plain, "fixed", "passed").is_right(plain)
    assert not told(plain, "fixed", "failed", "completed").is_right(plain)
    truly = replace(BUG, still={"completed": "for a reason"})
    assert told(truly, "fixed", "failed", "completed", still=["completed"]).is_right(truly)
    assert not told(truly, "fixed", "failed", "completed").is_right(truly), "not shown by plain code"
    assert not told(truly, "fixed", "failed", "completed", BUG.failed, still=["completed"]).is_right(truly)


def test_the_first_run_stays_in_the_table(tmp_path: Path) -> None:
    """Results are appended: the page counts the first run of each side, and the last. An incomplete line is ignored."""
    bug = replace(BUG, still={})
    results = [told(bug, "affected", "inconclusive"), told(bug, "fixed", "passed"),
               told(bug, "affected", "failed", bug.failed)]  # fmt: skip
    file = tmp_path / "results.jsonl"
    file.write_text("".join(one.to_json() + "\n" for one in results) + '{"bug": "acc')
    assert [one.verdict for one in sides.read(file)] == ["inconclusive", "passed", "failed"]
    old = "# Head\n<!-- museum: begin -->\nold\n<!-- museum: end -->\ntail\n"
    text = marks.filled(old, museum_page.tables([bug], sides.read(file)))
    assert text.startswith("# Head\n")
    assert text.endswith("tail\n")
    assert "| as first run | 0 of 1 | 1 of 1 | 0 of 1 |" in text
    assert "| now | 1 of 1 | 1 of 1 | 0 of 1 |" in text
    assert f"- {bug.name}, affected: as first run **inconclusive**." in text
    assert "old" not in text


def test_the_pages_can_be_made_again_from_the_kept_results() -> None:
    """Without a run, on any machine: the first run of each side stays known."""
    tables = museum_page.tables(ROWS, sides.read(museum.KEPT))
    for page, mark in ((PAGE, "museum"), (ROOT / "docs" / "measured" / "right-verdicts.md", "museum-summary")):
        assert marks.between(page.read_text(), mark) == f"\n{tables[mark]}\n"


def test_the_page_has_every_row_that_was_run() -> None:
    """And no row that is not in the folder."""
    text = PAGE.read_text()
    named = {line.split("]")[0][3:] for line in text.splitlines() if line.startswith("| [")}
    assert named
    assert named <= {bug.name for bug in ROWS}


@pytest.mark.job
@pytest.mark.long
@pytest.mark.timeout(1200)  # pip may have to fetch the versions
@pytest.mark.parametrize("bug", [bug for bug in ROWS if bug.long], ids=lambda bug: bug.name)
@pytest.mark.usefixtures("package_index")
def test_a_fast_row(bug: Bug, tmp_path: Path) -> None:
    """Plain code shows the bug with the affected version alone, and torchaos fails that version alone for it."""
    for side in museum.SIDES:
        packages = environments.made(bug.packages(side))
        shown = sides.shown(bug, side, packages)
        assert shown.is_shown(), json.dumps(shown.shown)
        one = sides.judged(bug, shown, packages, tmp_path, keep=False)
        assert one.is_right(bug), one.reason
