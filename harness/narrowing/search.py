"""Finds the places in a row of numbers at which the verdict changes, with few tries. Pure, except for the calls of
`verdict`. Between two numbers with different verdicts, it tries the number in the middle, as `git bisect` does. If a
number has no verdict, the nearest other number is tried instead. So a change is found between two neighbours, or all
numbers between its two ends have no verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

Verdict = Callable[[int], bool | None]  # of a number: passed, failed, or (None) no verdict
MOST_WITHOUT = 3  # a change is given up after this many numbers between its two ends without a verdict


class Change(NamedTuple):
    """The verdict of `before` differs from that of `after`."""

    before: int
    after: int

    @property
    def is_exact(self) -> bool:
        return self.after == self.before + 1


def changes(count: int, verdict: Verdict, known: Iterable[int] = (), samples: int = 0) -> list[Change]:
    """All changes that were found between 0 and `count` - 1, in order. The two ends and the `known` numbers are tried
    first. If all of them have the same verdict, up to `samples` more numbers are tried, each in the middle of the
    widest gap. `verdict` may be costly, and is called at most once for each number. Changes between two tried numbers
    with the same verdict are not found, and of several changes between two tried numbers only one is found."""
    tried: dict[int, bool | None] = {}

    def ask(at: int) -> bool | None:
        if at not in tried:
            tried[at] = verdict(at)
        return tried[at]

    for at in (0, count - 1, *known):
        ask(at)
    while samples and len(set(tried.values()) - {None}) < 2 and len(tried) < count:
        low, high = max(pairwise(sorted(tried)), key=lambda pair: pair[1] - pair[0])
        ask((low + high) // 2)
        samples -= 1
    decided = sorted(at for at, found in tried.items() if found is not None)
    return [_narrowed(low, high, ask, tried) for low, high in pairwise(decided) if tried[low] != tried[high]]


def _narrowed(low: int, high: int, ask: Verdict, tried: dict[int, bool | None]) -> Change:
    left = MOST_WITHOUT
    while left and (between := [at for at in range(low + 1, high) if at not in tried]):
        at = min(between, key=lambda number: abs(2 * number - low - high))
        found = ask(at)
        if found is None:
            left -= 1
        elif found == tried[low]:
            low = at
        else:
            high = at
    return Change(low, high)
