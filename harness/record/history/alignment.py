"""Finds the place of a sequence of steps among earlier steps. This is a witness that needs no counter."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

FEW = 8  # only the first steps after a resume; later steps may differ for other reasons


def align(own: Mapping[int, Hashable], reference: Mapping[int, Collection[Hashable]]) -> tuple[int, ...]:
    """Every b >= 0 that may be the global step before the first step of an attempt: the value of each of its first FEW
    steps n was also seen in global step b + n. `own`: the value of each step of the attempt. `reference`: the values
    that were seen in each global step. A step that `reference` lacks is skipped, except the first step."""
    first, *later = sorted(own)[:FEW] or [0]
    starts = [step - first for step, seen in reference.items() if own.get(first) in seen]
    return tuple(
        base
        for base in sorted(starts)
        if base >= 0 and all(own[n] in reference[base + n] for n in later if base + n in reference)
    )
