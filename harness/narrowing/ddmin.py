"""Delta debugging: the smallest part of a list that still fails. The algorithm is ddmin (Zeller and Hildebrandt,
Simplifying and Isolating Failure-Inducing Input, 2002). It tries subsets and then their complements, in smaller and
smaller parts. The result is 1-minimal: without any single one of its items it does not fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def ddmin(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """A smallest part of `items` that still fails. `fails(items)` must be true. `fails` is called at most once for each
    part, because it may be costly."""
    known: dict[tuple[int, ...], bool] = {}

    def still(part: Sequence[int]) -> bool:
        key = tuple(part)
        if key not in known:
            known[key] = fails([items[at] for at in part])
        return known[key]

    left, parts = list(range(len(items))), 2
    while len(left) >= 2:
        chunks = [left[n * len(left) // parts : (n + 1) * len(left) // parts] for n in range(parts)]
        complements = [[at for at in left if at not in chunk] for chunk in chunks] if parts > 2 else []
        smaller = next((part for part in (*chunks, *complements) if still(part)), None)
        if smaller is not None:
            parts = 2 if smaller in chunks else max(parts - 1, 2)
            left = smaller
        elif parts < len(left):
            parts = min(len(left), 2 * parts)
        else:
            break
    return [items[at] for at in left]
