"""Steps of which an attempt executed only the rest, because the job had saved in the middle of an accumulation, with
its gradients. Pure. The losses and samples of such a step are the last part of the twin's step, and the following steps
are equal to the twin's. So the gradients of the first part came from the checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from torchaos.harness.judging.noise.quantities import Steps
from torchaos.harness.record.history import Execution, History
from torchaos.harness.record.steps.executions import UNPLACED


def with_first_parts(history: History, twin: History) -> History:
    """The history. Each step that did only the rest of a step gets the losses and samples of the twin's whole step."""
    theirs = twin.by_step()
    whole = dict(_completed(history, theirs))
    return replace(history, executions=history.executions.replaced(whole)) if whole else history


def _completed(history: History, theirs: Steps) -> Iterator[tuple[int, Execution]]:
    """Yields the rows of such steps in the history's executions, each with the completed step."""
    every = history.executions
    step_of, attempt_of, segment_of = every.global_step, every.attempt, every.column("segment")
    later = np.flatnonzero((attempt_of > 0) & (step_of != UNPLACED))
    most = int(segment_of[later].max(initial=0)) + 1
    part_of = attempt_of[later].astype(np.int64) * most + segment_of[later]
    for part in np.unique(part_of).tolist():
        places = later[part_of == part]
        first = int(step_of[places].min())
        some = every[int(places[step_of[places] == first][0])]
        if (other := theirs.get(first, {}).get(some.rank)) is None or not _is_rest(some, other):
            continue
        near = places[step_of[places] <= first + 1].tolist()
        steps: dict[int, dict[int, Execution]] = defaultdict(dict)
        place_of: dict[tuple[int, int], int] = {}
        for place in near:
            execution = every[place]
            steps[execution.global_step or 0][execution.rank] = execution
            place_of[execution.global_step or 0, execution.rank] = place
        own, twins = steps[first], theirs.get(first, {})
        if own.keys() != twins.keys() or not all(_is_rest(own[rank], twins[rank]) for rank in own):
            continue
        if _led_to_the_same(own, twins, steps.get(first + 1, {}), theirs.get(first + 1, {})):
            for rank, execution in own.items():
                other = twins[rank]
                # Whether its samples are the end of the twin's samples can't be seen from a sum.
                blind = execution.sums is not None or other.sums is not None
                samples, indices = ((), ()) if blind else (other.samples, other.indices)
                yield (
                    place_of[first, rank],
                    replace(execution, losses=other.losses, samples=samples, indices=indices, sums=None),
                )


def _is_rest(own: Execution, twin: Execution) -> bool:
    """Whether everything that the rank did in the step is the end of the twin's step, but not the whole step."""
    if not 0 < len(own.losses) < len(twin.losses):
        return False
    blind = own.sums is not None or twin.sums is not None
    return all(
        (blind and mine is not own.losses) or mine == others[len(others) - len(mine) :]
        for mine, others in ((own.losses, twin.losses), (own.samples, twin.samples), (own.indices, twin.indices))
    )


def _led_to_the_same(
    own: Mapping[int, Execution], twins: Mapping[int, Execution],
    next_own: Mapping[int, Execution], next_twins: Mapping[int, Execution],
) -> bool:  # fmt: skip
    """Whether the step had the same result as the twin's. Compares the parameters after the step if both were seen,
    otherwise the losses of the next step."""
    pairs = [(own[rank].parameters, twins[rank].parameters) for rank in own]
    if None not in [parameters for pair in pairs for parameters in pair]:
        return all(mine == other for mine, other in pairs)
    losses = [
        (next_own[rank].losses, next_twins[rank].losses) for rank in own if rank in next_own and rank in next_twins
    ]
    return len(losses) == len(own) and all(mine and mine == other for mine, other in losses)
