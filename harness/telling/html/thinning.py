"""Chooses the points of a long series that are drawn: all points near important moments, and few elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import groupby


def groups(
    times: Sequence[float], most: int, moments: Sequence[float], apart: Sequence[Hashable]
) -> Iterator[tuple[int, int]]:
    """Joins neighbours until about `most` groups are left. Yields (first, last) of each group. Points next to a moment
    are not joined, and points with different values in `apart` are never in one group. `times` must ascend."""
    if len(times) <= most:
        yield from ((number, number) for number in range(len(times)))
        return
    near = sorted(range(len(times)), key=lambda n: min((abs(times[n] - at) for at in moments), default=times[n]))
    alone = set(near[: most // 2])
    size = -(-(len(times) - len(alone)) // max(1, most - len(alone)))
    for (_what, single), some in groupby(range(len(times)), key=lambda n: (apart[n], n in alone)):
        numbers = list(some)
        step = 1 if single else size
        yield from ((numbers[at], numbers[min(at + step, len(numbers)) - 1]) for at in range(0, len(numbers), step))


def telling(values: Sequence[float | None], most: int, keep: Collection[int] = ()) -> list[int]:
    """The indices of about `most` values that show the shape of the series: the smallest and the largest of each group,
    the first, the last, and the indices in `keep`."""
    if len(values) <= most:
        return list(range(len(values)))
    size = -(-2 * len(values) // most)
    found = {0, len(values) - 1, *(place for place in keep if 0 <= place < len(values))}
    for begin in range(0, len(values), size):
        seen = [place for place in range(begin, min(begin + size, len(values))) if values[place] is not None]
        if seen:
            found.add(min(seen, key=lambda place: values[place] or 0.0))
            found.add(max(seen, key=lambda place: values[place] or 0.0))
    return sorted(found)
