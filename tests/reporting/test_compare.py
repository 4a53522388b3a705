"""Is B worse than A? Only if the difference is larger than the noise; and "the same" is never said if it is not
known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchaos.harness.record.result import Recovery, Result, Verdict
from torchaos.harness.reporting.compare_runs import Change, compare, overall, p_greater
from torchaos.harness.reporting.trend_store import Kept

PASSED = Result("kill-rank", "", 0, Verdict.PASSED, 0, "all well", "/runs/a", "2026-11-20T00:00:00", 30.0)


def runs(
    *caught_up: float | None, lost: int | None = 5, verdict: Verdict = Verdict.PASSED, name: str = ""
) -> list[Kept]:
    parts = [{"felt": 0.1, "restored": at and at - 1.0, "caught_up": at} for at in caught_up]
    return [
        Kept(replace(PASSED, scenario=name or "kill-rank", verdict=verdict, reason="it is so",
                     recoveries=(Recovery("kill", one, lost),)), "")
        for one in parts
    ]  # fmt: skip


def change(before: Sequence[Kept], after: Sequence[Kept], what: str = "caught up") -> Change:
    return next(row.change for row in compare(before, after) if row.what == what)


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ([6.0, 6.2, 6.1], [9.0, 9.1, 9.3], Change.WORSE),
        ([9.0, 9.1, 9.3], [6.0, 6.2, 6.1], Change.BETTER),
        ([6.0, 6.2, 6.1], [6.4, 6.5, 6.6], Change.SAME),  # larger than chance, and too little to care
        ([6.0], [9.0], Change.UNCLEAR),  # one run each
        ([9.0], [6.0], Change.SAME),  # less is no regression, however few
        ([2.0, 6.0, 20.0], [3.0, 9.0, 21.0], Change.UNCLEAR),  # they differ as much among themselves
        ([0.1, 0.1, 0.1], [0.4, 0.4, 0.4], Change.SAME),  # below what a clock of events is worth
        ([6.0, 6.1], [6.0, None], Change.WORSE),
        ([None], [6.0], Change.BETTER),
        ([None], [None], Change.SAME),
    ],
)
def test_recovery_times(before: list[float | None], after: list[float | None], found: Change) -> None:
    """Slower is worse when it is by more than the tolerance, and by more than chance explains."""
    assert change(runs(*before), runs(*after)) is found


def test_a_verdict_that_turned_is_a_regression() -> None:
    """Passed before and failed after is worse by itself; the other way round it is better; no evidence is unclear."""
    passed, failed = runs(6.0), runs(6.0, verdict=Verdict.FAILED)
    assert change(passed, failed, "verdict") is Change.WORSE
    assert change(failed, passed, "verdict") is Change.BETTER
    assert change(passed, runs(6.0, verdict=Verdict.INCONCLUSIVE), "verdict") is Change.UNCLEAR
    assert change(runs(6.0, verdict=Verdict.INCONCLUSIVE), passed, "verdict") is Change.UNCLEAR
    assert change(passed, runs(6.0, verdict=Verdict.ERROR), "verdict") is Change.WORSE


def test_failing_more_often_is_a_regression() -> None:
    """Of a scenario that fails now and then, the rate decides, where there are runs enough to tell."""
    passed, failed = runs(6.0), runs(6.0, verdict=Verdict.FAILED)
    assert change([*passed * 9, *failed], [*passed * 8, *failed * 2], "verdict") is Change.SAME
    assert change([*passed * 9, *failed], [*passed, *failed * 9], "verdict") is Change.WORSE


def test_what_is_missing_is_not_the_same() -> None:
    """A scenario that no longer runs can't be told, one that is new is no regression, nothing at all is unclear."""
    both = [*runs(6.0), *runs(6.0, name="other")]
    assert overall(compare(both, runs(6.0))) is Change.UNCLEAR
    assert overall(compare(runs(6.0), both)) is Change.SAME
    assert overall(compare(runs(6.0), runs(6.0, name="other"))) is Change.UNCLEAR
    assert overall([]) is Change.UNCLEAR


def test_the_worst_counts() -> None:
    """One scenario that got worse outweighs all that is unclear or better."""
    before = [*runs(9.0, 9.1, 9.2), *runs(6.0, 6.0, 6.0, name="other"), *runs(1.0, name="third")]
    after = [*runs(5.0, 5.1, 5.2), *runs(9.0, 9.1, 9.2, name="other"), *runs(7.0, name="third")]
    rows = compare(before, after)
    assert {row.change for row in rows} >= {Change.BETTER, Change.WORSE, Change.UNCLEAR}
    assert overall(rows) is Change.WORSE
    told = next(row for row in rows if row.change is Change.WORSE)
    assert "restored came 3.1 s later" in told.why


def test_steps_done_again_count_too() -> None:
    """A job that recovers as fast and loses more work has got worse."""
    assert change(runs(6.0, 6.1, 6.2), runs(6.0, 6.1, 6.2, lost=9), "steps done again") is Change.WORSE


def test_the_rank_test_is_the_known_one() -> None:
    """Against values of the exact Mann-Whitney U, of tables: 3 against 3 wholly apart 1/20, 4 against 4 1/70, and equal
    samples no evidence at all; the approximation for many runs comes near the exact value."""
    assert p_greater([1, 2, 3], [4, 5, 6]) == pytest.approx(1 / 20)
    assert p_greater([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(1 / 70)
    assert p_greater([1, 2, 4], [3, 5, 6]) == pytest.approx(2 / 20)
    assert p_greater([5, 5, 5], [5, 5, 5]) == 1.0
    many = [float(number) for number in range(20)]
    later = [value + 6.5 for value in many]
    above = sum(a < b for a in many for b in later)
    exact = sum(ways(20, 20, count) for count in range(above, 401)) / math.comb(40, 20)
    assert p_greater(many, later) == pytest.approx(exact, abs=0.0005)


@cache
def ways(m: int, n: int, pairs: int) -> int:
    """In how many orders of m and n values that many pairs are in order (Mann and Whitney's recurrence, 1947)."""
    if pairs < 0 or pairs > m * n:
        return 0
    return 1 if m == 0 or n == 0 else ways(m - 1, n, pairs - n) + ways(m, n - 1, pairs)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_chance_is_a_probability(one: list[float], other: list[float]) -> None:
    """It lies between 0 and 1, and both directions together cover at least everything."""
    assert 0 < p_greater(one, other) <= 1
    assert p_greater(one, other) + p_greater(other, one) >= 1
