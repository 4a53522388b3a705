"""Chooses the ranks that have a lane in the chart of a large run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from torchaos.harness.judging.landing.landings import Landing
from torchaos.harness.record.history import History

MOST_RANKS = 32  # lanes
_FURTHEST = 8  # ranks


def ranks_with_lanes(history: History, landed: Sequence[Landing], named: Collection[int]) -> tuple[list[int], str]:
    """The ranks that have a lane, and a sentence about ranks that have none, which is empty if all ranks have a lane.
    `named`: the ranks that the user asked for."""
    every = {rank for attempt in history.attempts for rank in attempt.ranks} | history.executions.ranks
    if len(every) <= MOST_RANKS and not named:
        return sorted(every), ""
    hit = {rank for landing in landed for rank in landing.ranks}
    behind = set(_furthest_behind(history))
    groups = (set(named), hit, behind, every if not named else set())
    order = sorted(set().union(*groups) & every, key=lambda rank: (*(rank not in group for group in groups), rank))
    shown = sorted(order[:MOST_RANKS])
    if len(shown) == len(every):
        return shown, ""
    which = "those given by --ranks, those" if named else "the first ranks, those"
    return shown, (
        f"{len(shown)} of {len(every)} ranks have a lane: {which} that were hit, and those that ended a step furthest "
        "behind the first rank. `torchaos report --ranks 8-15` gives other ranks a lane"
    )


def _furthest_behind(history: History) -> list[int]:
    """The ranks that, in some step, ended the step the longest time after the first rank."""
    steps = history.by_step()
    if not len(steps):
        return []
    ended, rank = steps.executions.mono_s, steps.executions.rank
    behind = ended + steps.of_each(steps.most(-ended))
    longest = np.zeros(int(rank.max()) + 1)
    np.maximum.at(longest, rank, behind)
    found: list[int] = np.argsort(-longest, kind="stable")[:_FURTHEST].tolist()
    return found
