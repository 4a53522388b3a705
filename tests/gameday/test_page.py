"""The page of a game day: it shows everything in the score, and nothing in it can do harm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from day_page import day_page

from torchaos.harness.gameday.fault_outcomes import Outcome


def test_the_page_holds_the_day(tmp_path: Path) -> None:
    """The verdict, the ratio, each fault with what came of it and where it lies, each round, and what was left out."""
    found = day_page(tmp_path, (Outcome.RECOVERED, "pid 1 ended"), (Outcome.DEGRADED, "slower"), planned=1)
    assert '<span class="badge passed">passed</span> night' in found
    assert "1 round with 2 faults: 1 recovered, 1 degraded. Training got on in 60.0% of 100 s." in found
    assert "2 of 2 faults landed and were felt; not started, as they could not have ended before the day: f0" in found
    assert "<th>effective training time ratio (ETTR)</th>" in found
    assert ">60.0%</td>" in found
    marks = re.findall(r'<rect class="(\w+)" x="[\d.-]+" y="[\d.-]+" width="6"', found)
    assert marks == ["recovered", "degraded"]
    for words in ("f000-process.kill", "f001-process.kill", "pid 1 ended", "slower", "a rank dies", "a fan (3)"):
        assert words in found


@pytest.mark.parametrize("markdown", [False, True])
def test_each_bound_stands_beside_its_figure(tmp_path: Path, markdown: bool) -> None:
    """What was asked of the score is shown with what was measured, and whether it holds; times have their unit."""
    found = day_page(tmp_path, (Outcome.RECOVERED, ""), markdown=markdown, ettr=0.5, mttr="30s", lost_steps=3)
    text = " ".join(re.sub(r"<[^>]+>|\|", " ", found).split())
    for words in (
        "ettr (training time) 60.0% at least 50.0%",
        "mttr (mean time to recover) 6 s at most 30 s",
        "lost steps 12 at most 3",
    ):
        assert words in text
    state = r"\| at (?:least|most) \S+(?: s)? \| (\w+) \|" if markdown else r'class="gauge (\w+)"'
    assert re.findall(state, found) == ["passed", "passed", "failed", "passed", "passed"]


def test_a_bar_of_training_time_is_the_share_itself(tmp_path: Path) -> None:
    """With a mark at its bound: 60 % is no full bar, though it is more than was asked. Time to recover fills its bar at
    the bound. A day that passed names the fault that was not started, and does not count it beside the verdict."""
    found = day_page(tmp_path, (Outcome.RECOVERED, ""), planned=1, ettr=0.5, mttr="30s")
    ettr, mttr = (part.partition("</svg>")[0] for part in found.split('class="gauge passed"')[1:3])
    assert re.findall(r'width="([\d.]+)"', ettr) == ["100", "60.00", "1"]
    assert 'class="bound" x="49.50"' in ettr
    assert re.findall(r'width="([\d.]+)"', mttr) == ["100", "20.00"]
    assert "Seed 7: 1 of 1 round, 1 fault." in found


def test_the_parts_of_the_bar_fill_it(tmp_path: Path) -> None:
    """Each begins where the one before ends, and together they are the whole."""
    found = day_page(tmp_path, (Outcome.RECOVERED, ""))
    bar = found.partition('class="share"')[2].partition("</svg>")[0]
    parts = [(float(x), float(w)) for x, w in re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', bar)]
    assert [x for x, _ in parts] == [0.0, 60.0, 80.0, 85.0, 90.0]
    assert sum(width for _, width in parts) == 100.0


def test_a_report_that_was_kept_is_linked(tmp_path: Path) -> None:
    """Relative to the page, so that the folder can be moved; a round whose files are gone has no link."""
    assert "<a href=" not in day_page(tmp_path, (Outcome.RECOVERED, "")).partition('id="rounds"')[2]
    run = tmp_path / "rounds" / "000" / "run" / "one"
    run.mkdir(parents=True)
    (run / "report.html").write_text("a report")
    assert '<a href="rounds/000/run/one/report.html">0</a>' in day_page(tmp_path, (Outcome.RECOVERED, ""))


def test_a_day_on_which_nothing_came(tmp_path: Path) -> None:
    """A day that was ended before its first round still has a page, which says so."""
    found = day_page(tmp_path, planned=2)
    assert "No fault came." in found
    assert "inconclusive" in found


def test_what_others_wrote_can_do_nothing(tmp_path: Path) -> None:
    """A log line or a cause that is HTML is shown as it is; a secret is not shown."""
    text = "<script>alert(1)</script> HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz"
    found = day_page(tmp_path, (Outcome.STUCK, text), cause="<img src=x onerror=alert(1)>")
    assert "<script>alert" not in found
    assert "<img" not in found
    assert "&lt;script&gt;alert(1)" in found
    assert "hf_abcdefghijklmnopqrstuvwxyz" not in found
