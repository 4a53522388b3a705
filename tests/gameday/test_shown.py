"""What the terminal tells of a game day: its progress, and a short report at its end."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from torchaos.harness.gameday import day as follower
from torchaos.harness.gameday.day import Day, following
from torchaos.harness.gameday.day_grammar import Bounds, Risk
from torchaos.harness.gameday.fault_outcomes import Clock, FaultOutcome, Outcome
from torchaos.harness.gameday.fault_schedule import Drawn, Round
from torchaos.harness.gameday.report import caveat, page, show, spread_rows, to_look_at
from torchaos.harness.gameday.score import RoundScore, cases_of, total

CAUSE = "lr_continuity: the learning rate differs first in step 411 on rank 0"


def a_day(many: int = 6) -> tuple[Day, list[RoundScore]]:
    """Six rounds, in each of which a fault damages the job for the same reason."""
    risk = Risk.model_validate({"inject": "process.kill", "target": {"rank": "any"}})
    drawn = [Drawn(f"f{n:03d}-process.kill", 30.0 * (n + 1), risk) for n in range(many)]
    planned = tuple(Round(n, 60.0 * n, 60.0 * (n + 1), (fault,)) for n, fault in enumerate(drawn))
    clock = Clock(productive_s=80.0, lost_s=5.0, checkpoint_s=5.0, down_s=10.0)
    rounds = [
        RoundScore(
            n, "failed", CAUSE, 1, f"/day/rounds/{n:03d}/run/one", 2, clock,
            (FaultOutcome(fault.id, "process.kill", Outcome.DAMAGED, CAUSE, {"caught_up": 4.0}, 3),), failed=(CAUSE,),
        )
        for n, fault in enumerate(drawn)
    ]  # fmt: skip
    return Day("night", 7, "/here", (), (), planned), rounds


def test_a_cause_is_told_once(tmp_path: Path) -> None:
    """The same damage in six rounds is one line with its faults, on the terminal in at most 15 lines."""
    day, rounds = a_day()
    score = total(rounds)
    cases = cases_of(score, Bounds(), rounds)
    paper = io.StringIO()
    show(day, "/day", rounds, score, cases, Console(file=paper, width=100))
    assert paper.getvalue().count("the learning rate differs") == 1
    assert len(paper.getvalue().splitlines()) <= 15
    assert "6 silent damage" in paper.getvalue()
    told = page(day, "/day", rounds, score, cases).partition("## To look at")[2]
    assert told.count("the learning rate differs") == 1
    assert all(fault.id in told for each in rounds for fault in each.faults)
    assert told.count("again: ") == 6


def test_the_round_that_decided_is_the_one_to_run_again() -> None:
    """A fault of an early round slowed the job down, and a later round failed: the later one comes first, and its
    command is given."""
    day, rounds = a_day(3)
    slow = replace(rounds[0].faults[0], outcome=Outcome.DEGRADED, reason="a step takes longer")
    unfelt = replace(rounds[1].faults[0], outcome=Outcome.UNPROVED, reason="it never landed")
    rounds[0] = replace(rounds[0], verdict="passed", reason="", failed=(), faults=(slow,))
    rounds[1] = replace(rounds[1], verdict="inconclusive", reason="it never landed", failed=(), faults=(unfelt,))
    assert [one.rounds for one in to_look_at(rounds)] == [(2,), (1,), (0,)]
    score, paper = total(rounds), io.StringIO()
    show(day, "/day", rounds, score, cases_of(score, Bounds(), rounds), Console(file=paper, width=100))
    assert "torchaos run /day/rounds/002/scenario.yaml" in paper.getvalue()


def test_a_few_faults_are_called_no_statistic() -> None:
    """Of two faults there is no p90, and of one no median; the report says that they are few, and of many it does
    not."""
    day, rounds = a_day(2)
    assert spread_rows(total(rounds)) == [["caught up", "2", "4 s", "", "", "4 s"]]
    assert spread_rows(total(rounds[:1]))[0] == ["caught up", "1", "4 s", "", "", ""]
    paper, score = io.StringIO(), total(rounds)
    cases = cases_of(score, Bounds(), rounds)
    show(day, "/day", rounds, score, cases, Console(file=paper, width=200))
    few = "2 faults in 3.3 min: this is an example and no statistic"
    assert few in paper.getvalue()
    assert few in page(day, "/day", rounds, score, cases)
    assert not caveat(total(a_day(6)[1]))


def test_a_round_with_a_reason_of_its_own_is_told() -> None:
    """Its faults recovered, and the round is still no evidence."""
    _, rounds = a_day(1)
    quiet = replace(rounds[0], faults=(), verdict="inconclusive", reason="the journal is damaged")
    (one,) = to_look_at([quiet])
    assert (one.outcome, one.reason, one.rounds) == ("", "inconclusive: the journal is damaged", (0,))


def test_progress_of_a_round(tmp_path: Path, monkeypatch: Any) -> None:
    """Each fault that hits is told while the round runs, and lines of other things are not."""
    monkeypatch.setattr(follower, "EVERY_S", 0.01)
    told, heard = list[str](), threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        heard.set()

    log = tmp_path / "console.log"
    with following(log, ["f000-process.kill"], tell):
        log.write_text("  1.00 s step 4, attempt 0\n 12.03 s process.kill (f000-process.kill) hits rank 1 in step 25\n")
        assert heard.wait(300)
        with log.open("a") as file:
            file.write(" 13.00 s process.kill (f000-process.kill) is armed\n 14.00 s the run is ended early: SIGTERM")
    assert told == ["  12.03 s process.kill (f000-process.kill) hits rank 1 in step 25"]
