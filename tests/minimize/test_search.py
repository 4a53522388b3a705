"""The search along a line of releases: with few tries it finds both ends of each window that the tries hit, and reports
only what was tried."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from torchaos.harness.minimize.package_bisect import MOST_WITHOUT, Change, changes

COUNTS = st.integers(2, 60)


def counted(verdict: Callable[[int], bool | None]) -> tuple[Callable[[int], bool | None], list[int]]:
    """The same verdict, and the list of the numbers that were asked for."""
    asked: list[int] = []

    def ask(at: int) -> bool | None:
        asked.append(at)
        return verdict(at)

    return ask, asked


@given(COUNTS.flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count - 1))), st.booleans())
def test_where_it_breaks_or_is_mended(case: tuple[int, int], good_first: bool) -> None:
    """One change is found exactly, with two tries of the ends and one for each halving."""
    count, first = case
    ask, asked = counted(lambda at: (at < first) == good_first)
    assert changes(count, ask) == [Change(first - 1, first)]
    assert len(asked) == len(set(asked)) <= 2 + ceil(log2(count))


@given(st.integers(3, 60), st.data())
def test_both_ends_of_a_window_with_a_known_bad_release(count: int, data: st.DataObject) -> None:
    """Any window of bad releases between two good ends, if the user knows any of them."""
    first = data.draw(st.integers(1, count - 2))
    last = data.draw(st.integers(first, count - 2))
    known = data.draw(st.integers(first, last))
    ask, asked = counted(lambda at: not first <= at <= last)
    assert changes(count, ask, [known]) == [Change(first - 1, first), Change(last, last + 1)]
    assert len(asked) <= 3 + 2 * ceil(log2(count))


@given(st.integers(3, 60), st.data())
def test_samples_find_each_window_that_is_as_wide_as_their_distance(count: int, data: st.DataObject) -> None:
    """With enough samples no window is missed; without any, nothing is claimed."""
    first = data.draw(st.integers(1, count - 2))
    last = data.draw(st.integers(first, count - 2))
    ask, _ = counted(lambda at: not first <= at <= last)
    assert changes(count, ask) == []
    assert changes(count, ask, samples=count) == [Change(first - 1, first), Change(last, last + 1)]


@given(COUNTS, st.data())
def test_what_has_no_verdict_names_nothing(count: int, data: st.DataObject) -> None:
    """Whatever the verdicts: both numbers of a change were seen, and differ; what was tried between them has no
    verdict; and few of those are tried."""
    line = data.draw(st.lists(st.sampled_from([True, False, None]), min_size=count, max_size=count))
    known = data.draw(st.lists(st.integers(0, count - 1), max_size=2))
    ask, asked = counted(lambda at: line[at])
    found = changes(count, ask, known)
    for low, high in found:
        assert low in asked
        assert high in asked
        assert {line[low], line[high]} == {True, False}
        between = [at for at in asked if low < at < high]
        assert all(line[at] is None for at in between)
        assert len(between) == high - low - 1 or [line[at] for at in asked].count(None) >= MOST_WITHOUT
        assert Change(low, high).is_exact == (high - low == 1)
    if line[0] is None and line[-1] is None and not known:
        assert found == []


def test_a_release_without_a_verdict_is_passed_over() -> None:
    """The change is named exactly, although the first one that is tried can't be installed."""
    line = [True, True, True, None, True, False, False]
    assert changes(len(line), lambda at: line[at]) == [Change(4, 5)]
