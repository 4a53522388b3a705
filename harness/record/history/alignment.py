"""Finds the place of a sequence of steps among earlier steps. This is a witness that needs no counter."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

FEW = 8  # only the first steps after a resume; later steps may differ for other reasons


def align(own: Mapping[int, Hashable], reference: Mapping[int, Collection[Hashable]]) -> tuple[int, ...]:
    """Every base b >= 0 for which local step n equals global step b + n, for the first FEW steps. `reference`: the
    values seen in each global step, once or several times. Steps that it lacks are skipped, but the first step must be
    found."""
    first, *later = sorted(own)[:FEW] or [0]
    starts = [step - first for step, seen in reference.items() if own.get(first) in seen]
    return tuple(
        base
        for base in sorted(starts)
        if base >= 0 and all(own[n] in reference[base + n] for n in later if base + n in reference)
    )
