"""Game days from night to night: stored in the history, shown, and compared by their own rounds and faults."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from torchaos.harness.cli import cli
from torchaos.harness.gameday.fault_outcomes import Clock, FaultOutcome, Outcome
from torchaos.harness.gameday.score import RoundScore, total
from torchaos.harness.interfaces import UsageError
from torchaos.harness.reporting import compare_runs
from torchaos.harness.reporting.compare_runs import Change, Night, compare_nights, overall
from torchaos.harness.reporting.trend_store import path_of


def night(folder: Path, caught_up: float, verdict: str = "passed", commit: str = "a" * 40, down: float = 0.0) -> Path:
    """A game day of six rounds of two faults each, as `torchaos gameday` leaves it."""
    rounds = [
        RoundScore(
            number, "passed", "", 0, "", 2, Clock(productive_s=80 + number, down_s=20 + down),
            tuple(
                FaultOutcome(f"f{n}", "process.kill", Outcome.RECOVERED, "",
                             {"first_step": 5.0, "caught_up": caught_up + number / 10 + n / 100}, 7)
                for n in range(2)
            ),
        )
        for number in range(6)
    ]  # fmt: skip
    told = {
        "name": "night", "seed": 3, "started": f"2026-11-{10 + len(list(folder.parent.glob('*/score.json')))}T22:00:00",
        "commit": commit, "verdict": verdict, "why": ["mttr is 40, and is to be at most 30"],
        "score": asdict(total(rounds)), "rounds": [one.to_json() for one in rounds],
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "day.json").write_text("{}")
    (folder / "score.json").write_text(json.dumps(told))
    return folder


def torchaos(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """Two nights alike, and a third in which recovery takes much longer."""
    night(tmp_path / "days" / "one", 10)
    night(tmp_path / "days" / "two", 10.2)
    night(tmp_path / "days" / "three", 40, "failed", "b" * 40, down=60)
    return tmp_path / "days"


def test_nights_are_kept_and_shown(days: Path) -> None:
    """Each night has a line with its ratio, its recovery time and its verdict, and outlives its folder."""
    done = torchaos("history", "--out", days)
    assert done.exit_code == 0, done.output
    assert "80.5%" in done.output
    assert "failed: mttr is 40" in done.output
    compare_runs.add(path_of(days), compare_runs.found_in(days))  # as each day does at its end
    for path in days.glob("*/score.json"):
        path.unlink()
    assert [one.verdict for one in compare_runs.kept(path_of(days))] == ["passed", "passed", "failed"]
    raw = json.loads(torchaos("history", "--out", days, "--json").output)
    assert [one["commit"][0] for one in raw] == ["a", "a", "b"]
    assert not compare_runs.kept(path_of(days), ["another"])
    assert len(compare_runs.kept(path_of(days), ["night"], "bb")) == 1


def test_a_night_that_is_worse_is_a_regression(days: Path) -> None:
    """Recovery that took four times as long in every fault is no chance, nor is more time without training; two nights
    alike are the same."""
    one, two, three = (Night.of(days / name) for name in ("one", "two", "three"))
    same = compare_nights([one], [two])
    assert {row.change for row in same} == {Change.SAME}, same
    found = {row.what: row for row in compare_nights([one, two], [three])}
    assert found["caught up"].change is found["time not training"].change is found["verdict"].change is Change.WORSE
    assert found["steps done again"].change is Change.SAME
    better = {row.what: row.change for row in compare_nights([three], [one])}
    assert better["verdict"] is better["caught up"] is better["time not training"] is Change.BETTER


def test_nights_are_compared_by_the_command(days: Path) -> None:
    """By directory or by commit; the exit code says what came of it."""
    assert torchaos("compare", days / "one", days / "two").exit_code == 0
    worse = torchaos("compare", days / "one", days / "three")
    assert (worse.exit_code, "there is a regression" in worse.output) == (1, True), worse.output
    assert torchaos("history", "--out", days).exit_code == 0
    assert torchaos("compare", "aaaa", "bbbb", "--out", days).exit_code == 1


@pytest.mark.parametrize("missing", ["before", "after"])
def test_a_night_without_a_counterpart_proves_nothing(days: Path, missing: str) -> None:
    """What was not run again is unclear, what is new is no regression; neither is said to be the same."""
    sides = [[Night.of(days / "one")], [Night.of(days / "one")]]
    sides[missing == "after"] = []
    before, after = sides
    assert overall(compare_nights(before, after)) is Change.UNCLEAR


def test_an_inconclusive_night_is_unclear(days: Path) -> None:
    """Whatever its times are."""
    night(days / "four", 10, "inconclusive")
    assert overall(compare_nights([Night.of(days / "one")], [Night.of(days / "four")])) is Change.UNCLEAR


def test_the_page_draws_the_nights(days: Path, tmp_path: Path) -> None:
    """A chart of the ratio from night to night, and a table of all nights with their reasons."""
    page = tmp_path / "index.html"
    done = torchaos("history", "--out", days, "--html", page)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "mttr is 40" in text
    data = json.loads(text[text.index('id="data">') + 10 :].partition("</script>")[0])
    (trend,) = data["trends"]
    assert (trend["scenario"], [one["value"] for one in trend["runs"]]) == ("night", [80.49, 80.49, 50.77])


@pytest.mark.parametrize("text", ["", "[]", '{"name": 1}', '{"rounds": [[]]}'])
def test_a_damaged_score_is_told(days: Path, text: str) -> None:
    """One clear error by name; a folder's listing passes it over."""
    (days / "one" / "score.json").write_text(text)
    with pytest.raises(UsageError, match="damaged"):
        Night.of(days / "one")
    assert len(compare_runs.found_in(days)) == 2
