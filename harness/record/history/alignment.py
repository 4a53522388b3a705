"""Where a sequence of steps fits into what was seen before: the witness that needs no counter at all."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

FEW = 8  # the steps after a resume show what was restored; later ones may differ for other reasons


def align(own: Mapping[int, Hashable], reference: Mapping[int, Collection[Hashable]]) -> tuple[int, ...]:
    """Every base b >= 0 such that local step n is what global step b + n was, for the first FEW steps.

    `reference` has what was seen in each global step, once or several times; steps that it lacks are no hindrance,
    but the first step must be found."""
    first, *later = sorted(own)[:FEW] or [0]
    starts = [step - first for step, seen in reference.items() if own.get(first) in seen]
    return tuple(
        base
        for base in sorted(starts)
        if base >= 0 and all(own[n] in reference[base + n] for n in later if base + n in reference)
    )
