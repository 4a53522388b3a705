"""Steps of which an attempt executed only the rest, because the job had saved in the middle of an accumulation, with
its gradients. Pure.

The losses and samples of such a step are the last ones of the twin's step, and the following steps are equal to the
twin's. So the gradients of the first part came from the checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torchaos.harness.judging.noise.quantities import Steps
from torchaos.harness.record.history import Execution, History


def with_first_parts(history: History, twin: History) -> History:
    """The history, in which each such step has the losses and samples of the twin's whole step."""
    theirs = twin.by_step()
    whole = {id(old): new for old, new in _completed(history, theirs)}
    if not whole:
        return history
    return replace(history, executions=tuple(whole.get(id(one), one) for one in history.executions))


def _completed(history: History, theirs: Steps) -> Iterator[tuple[Execution, Execution]]:
    of_segments: dict[tuple[int, int], dict[int, dict[int, Execution]]] = defaultdict(lambda: defaultdict(dict))
    for one in history.executions:
        if one.attempt and one.global_step is not None:
            of_segments[one.attempt, one.segment][one.global_step][one.rank] = one
    for steps in of_segments.values():
        first = min(steps)
        own, twins = steps[first], theirs.get(first, {})
        if own.keys() != twins.keys() or not all(_is_rest(own[rank], twins[rank]) for rank in own):
            continue
        if _led_to_the_same(own, twins, steps.get(first + 1, {}), theirs.get(first + 1, {})):
            for rank, one in own.items():
                other = twins[rank]
                yield one, replace(one, losses=other.losses, samples=other.samples, indices=other.indices)


def _is_rest(own: Execution, twin: Execution) -> bool:
    """Whether everything that the rank did in the step is the end of the twin's step, but not the whole step."""
    if not 0 < len(own.losses) < len(twin.losses):
        return False
    return all(
        mine == others[len(others) - len(mine) :]
        for mine, others in ((own.losses, twin.losses), (own.samples, twin.samples), (own.indices, twin.indices))
    )


def _led_to_the_same(
    own: Mapping[int, Execution], twins: Mapping[int, Execution],
    next_own: Mapping[int, Execution], next_twins: Mapping[int, Execution],
) -> bool:  # fmt: skip
    """Whether the step had the same result as the twin's. Compares the parameters after the step if both were seen,
    otherwise the losses of the next step."""
    pairs = [(own[rank].parameters, twins[rank].parameters) for rank in own]
    if None not in [one for pair in pairs for one in pair]:
        return all(mine == other for mine, other in pairs)
    losses = [
        (next_own[rank].losses, next_twins[rank].losses) for rank in own if rank in next_own and rank in next_twins
    ]
    return len(losses) == len(own) and all(mine and mine == other for mine, other in losses)
