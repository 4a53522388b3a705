"""How long a step of a job usually takes, and when a step takes too long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.record.history import History
from torchaos.harness.record.steps.executions import UNPLACED

Array = npt.NDArray[Any]

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

    @property
    def least_s(self) -> float:
        """The shortest time, in seconds, that can be a halt."""
        return max(_LEAST_S, _TIMES * self.usual_s)

    def is_halt(self, took_s: float, step: int | None) -> bool:
        """Whether `took_s` seconds are too long for this global step. `step` None: for any step."""
        near = [self.pauses[n] for n in (step - 1, step, step + 1) if n in self.pauses] if step is not None else []
        pause_s = max(near, default=self.longest_s)
        return took_s > max(self.least_s, _PAUSES * pause_s)


def pace_of(history: History, before_s: float, twins: Sequence[History] = ()) -> Pace:
    """The pace of the twins' steps, and of the run's steps that ended before `before_s` (the time of the first fault,
    CLOCK_MONOTONIC)."""
    of_twins = [_gaps(twin) for twin in twins]
    calm = np.concatenate([_gaps(history, before_s).took_s, *(gaps.took_s for gaps in of_twins)])
    pauses: dict[int, float] = {}
    for gaps in of_twins:
        for step, took in gaps.longest().items():
            pauses[step] = max(pauses.get(step, 0.0), took)
    known = calm if len(calm) >= _ENOUGH else _gaps(history).took_s
    usual_s = float(np.median(known)) if len(known) >= _ENOUGH else 0.0
    return Pace(usual_s, pauses, float(calm.max(initial=0.0)))


@dataclass(frozen=True)
class _Gaps:
    """Each step of each rank and attempt, except the first, with the seconds since the end of the step before."""

    took_s: Array
    step: Array  # global; UNPLACED: not known

    def longest(self) -> dict[int, float]:
        """The longest time by global step."""
        order = np.argsort(self.step, kind="stable")
        order = order[self.step[order] != UNPLACED]
        steps, starts = np.unique(self.step[order], return_index=True)
        longest = np.maximum.reduceat(self.took_s[order], starts) if len(steps) else steps
        return dict(zip(steps.tolist(), longest.tolist(), strict=True))


def _gaps(history: History, before_s: float = math.inf) -> _Gaps:
    """Of the steps that ended by `before_s`, CLOCK_MONOTONIC."""
    took_s, step = [np.zeros(0)], [np.zeros(0, np.int64)]
    for places in history.executions.by_ranks():
        steps = history.executions.at(places)
        attempt, rank, over_s = steps.attempt, steps.rank, steps.mono_s
        order = np.lexsort((over_s, rank, attempt))
        follows = (np.diff(attempt[order]) == 0) & (np.diff(rank[order]) == 0) & (over_s[order][1:] <= before_s)
        took_s.append(np.diff(over_s[order])[follows])
        step.append(steps.global_step[order[1:][follows]])
    return _Gaps(np.concatenate(took_s), np.concatenate(step))
