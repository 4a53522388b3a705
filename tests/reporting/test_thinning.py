from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchaos.harness.reporting.html.charts import groups, telling

TIMES = st.lists(st.floats(0, 1e6), max_size=300).map(sorted)


@given(TIMES, st.integers(2, 50), st.lists(st.floats(0, 1e6), max_size=3), st.integers(1, 100))
def test_every_step_is_in_one_group(times: list[float], most: int, moments: list[float], attempt: int) -> None:
    """Groups follow each other without gap or overlap, never cross an attempt, and are not many more than wanted."""
    apart = [number // attempt for number in range(len(times))]
    found = list(groups(times, most, moments, apart))
    assert [number for first, last in found for number in range(first, last + 1)] == list(range(len(times)))
    assert all(apart[first] == apart[last] for first, last in found)
    assert len(found) <= max(len(times) if len(times) <= most else 0, 2 * most + 2 * len(set(apart)) + len(moments) + 2)


@given(st.integers(100, 300), st.floats(0, 300))
def test_steps_near_a_moment_stay_alone(count: int, moment: float) -> None:
    """Of a long series, those nearest to the fault are not put together."""
    times = [float(number) for number in range(count)]
    alone = {first for first, last in groups(times, 40, [moment], [0] * count) if first == last}
    nearest = sorted(range(count), key=lambda number: abs(number - moment))[:19]
    assert set(nearest) <= alone


@given(st.lists(st.none() | st.floats(-1e9, 1e9), min_size=1, max_size=400), st.integers(4, 60), st.integers(0, 399))
def test_peaks_survive(values: list[float | None], most: int, keep: int) -> None:
    """The lowest and highest value, the first and last place, and whatever is to be kept are always drawn."""
    found = telling(values, most, {keep})
    assert found == sorted(set(found))
    seen = [value for value in values if value is not None]
    drawn = [values[place] for place in found]
    if seen:
        assert min(seen) in drawn
        assert max(seen) in drawn
    assert {0, len(values) - 1} <= set(found)
    assert keep in found or keep >= len(values)
    assert len(found) <= max(most, min(len(values), most + 6))
