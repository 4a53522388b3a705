"""The page of many runs: the contents of a row, without a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from torchaos.harness.record.result import Case, Result, Verdict
from torchaos.harness.reporting.html import index
from torchaos.harness.reporting.trend_store import Kept


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ({"catch_up": 60.0, "lost_steps": 5}, "6.84 s of 60 s 5 of 5"), ({"catch_up": 60.0}, "6.84 s of 60 s 5"),
        ({}, "6.84 s 5"), ({"felt": 1.0}, "6.84 s 5"),
    ],
)  # fmt: skip
def test_a_figure_stands_beside_its_bound(
    results: dict[str, Result], tmp_path: Path, bound: dict[str, float], words: str
) -> None:
    """A bound that the scenario gave is shown, one that it did not give is not; neither is needed."""
    case = Case("recovery_time", "assertion", Verdict.PASSED, "caught up", {}, bound)
    page = index.text([Kept(replace(results["passed"], cases=(case,)), "4f2c81a")], tmp_path)
    row = page[page.index("<tbody>") : page.index("</tbody>")]
    assert f"4f2c81a {words}" in " ".join(re.sub(r"<[^>]+>", " ", row).split())


def test_a_run_without_recovery_time_has_a_row(results: dict[str, Result], tmp_path: Path) -> None:
    """Neither the assertion nor a recovery is needed."""
    for recoveries in ((), results["passed"].recoveries):
        one = replace(results["passed"], cases=(), recoveries=recoveries)
        assert "kill-rank" in index.text([Kept(one, "")], tmp_path)


def test_the_trend_has_the_bound(results: dict[str, Result], tmp_path: Path) -> None:
    """Each run of a trend brings its bound, which is drawn beside the times."""
    page = index.text([Kept(results["passed"], "4f2c81a"), Kept(results["passed"], "9b07e33")], tmp_path)
    assert page.count('"bound": 60.0') == 2


def test_the_page_begins_with_the_newest_runs(results: dict[str, Result], tmp_path: Path) -> None:
    """How the newest run of each scenario ended, by name, and the figures that are nearest to their bounds: an older
    failure of a scenario that passes now is not among them."""
    passed, failed = results["passed"], replace(results["failed"], scenario="freeze-rank")
    runs = [Kept(one, "") for one in (replace(failed, scenario="kill-rank"), passed, failed)]
    text = " ".join(re.sub(r"<[^>]+>", " ", index.text(runs, tmp_path).partition("<header>")[2]).split())
    assert text.startswith("3 runs The newest run of each scenario: 1 failed (freeze-rank), 1 passed.")
    assert "newest runs that passed 1 of 2" in text
    assert "recovery 6.84 s 60 s allowed, freeze-rank" in text
