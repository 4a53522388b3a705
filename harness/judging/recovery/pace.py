"""How long a step of a job usually takes, and when a step takes too long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from torchaos.harness.record.history import Execution, History

# A halt is longer than each of these limits.
_TIMES = 10.0  # in usual steps
_LEAST_S = 1.0  # seconds; machines hesitate
_PAUSES = 3.0  # in pauses of the job itself, such as checkpoints or evaluations
_ENOUGH = 3  # steps that are needed to know the usual time


@dataclass(frozen=True)
class Pace:
    """The usual times from step to step."""

    usual_s: float  # the median; 0 if too few steps were seen
    pauses: Mapping[int, float]  # by global step: the longest time, in seconds, that a twin took for it
    longest_s: float  # the longest usual time, for steps that no twin made

    def is_halt(self, took_s: float, step: int | None) -> bool:
        """Whether `took_s` seconds are too long for this global step. `step` None: for any step."""
        near = [self.pauses[n] for n in (step - 1, step, step + 1) if n in self.pauses] if step is not None else []
        pause_s = max(near, default=self.longest_s)
        return took_s > max(_LEAST_S, _TIMES * self.usual_s, _PAUSES * pause_s)


def pace_of(history: History, before_s: float, twins: Sequence[History] = ()) -> Pace:
    """The pace of the steps that ended before `before_s` (the time of the first fault, CLOCK_MONOTONIC) and of the
    twins' steps."""
    own = list(_gaps(history))
    calm = [took for end, took in own if end.mono_s <= before_s]
    pauses: dict[int, float] = defaultdict(float)
    for twin in twins:
        for end, took in _gaps(twin):
            calm.append(took)
            if end.global_step is not None:
                pauses[end.global_step] = max(pauses[end.global_step], took)
    known = calm if len(calm) >= _ENOUGH else [took for _, took in own]
    return Pace(median(known) if len(known) >= _ENOUGH else 0.0, pauses, max(calm, default=0.0))


def _gaps(history: History) -> Iterator[tuple[Execution, float]]:
    """Each step of each rank and attempt, except the first, with the seconds since the end of the step before."""
    ranks: dict[tuple[int, int], list[Execution]] = defaultdict(list)
    for step in history.executions:
        ranks[step.attempt, step.rank].append(step)
    for steps in ranks.values():
        ordered = sorted(steps, key=lambda step: step.mono_s)
        yield from ((b, b.mono_s - a.mono_s) for a, b in pairwise(ordered))
