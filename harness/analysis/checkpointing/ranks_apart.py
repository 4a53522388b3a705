"""Finds the step after which ranks that had held the same parameters no longer did. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from torchaos.harness.analysis.checkpointing.saved_parameters import step_of
from torchaos.harness.protocol.check_sums import is_whole
from torchaos.harness.record.history.snapshots import states
from torchaos.harness.record.record import Record


class Apart(NamedTuple):
    step: int  # global
    attempt: int
    at_s: float  # when it was seen, CLOCK_MONOTONIC


def ranks_apart(run: Record) -> Apart | None:
    """The first step after which the ranks were seen with different parameters, if they had been seen with the same
    before, and never with different ones. None if there is none, or if the parameters were not recorded."""
    found: dict[tuple[int, int], dict[int, tuple[object, float]]] = defaultdict(dict)
    for one in run.history.executions.placed:
        if one.global_step is not None and one.parameters is not None and is_whole(one.parameters):
            found[one.attempt, one.global_step][one.rank] = one.parameters, one.mono_s
    if not found:  # then the states at saves and resumes may show it
        for state in states(run.beside_steps):
            step, sums = step_of(run.history, state.event), state.sums.get("parameters")
            if step is not None and sums:
                every = tuple(sorted((name, *entry) for name, entry in sums.items()))
                found[state.event.attempt or 0, step][state.event.rank or 0] = every, state.event.mono_s
    equal = 0
    for (attempt, step), ranks in sorted(found.items()):
        if len({parameters for parameters, _ in ranks.values()}) > 1:
            return Apart(step, attempt, max(at_s for _, at_s in ranks.values())) if equal else None
        equal += len(ranks) > 1
    return None
