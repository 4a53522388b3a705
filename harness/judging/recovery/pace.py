"""How long a step of a job usually takes, and when a step takes too long."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
    took_s, pauses = [_took_s(history, before_s)], dict[int, float]()
    for gaps in (gaps for twin in twins for gaps in _gaps(twin)):
        took_s.append(gaps.took_s)
        for step, longest_s in gaps.longest().items():
            pauses[step] = max(pauses.get(step, 0.0), longest_s)
    calm = np.concatenate(took_s)
    known = calm if len(calm) >= _ENOUGH else _took_s(history)
    usual_s = float(np.median(known)) if len(known) >= _ENOUGH else 0.0
    return Pace(usual_s, pauses, float(calm.max(initial=0.0)))


@dataclass(frozen=True)
class _Gaps:
    """Each step of some ranks, except the first of each attempt, with the seconds since the end of the step before."""

    took_s: Array
    step: Array  # global; UNPLACED: not known

    def longest(self) -> dict[int, float]:
        """The longest time by global step."""
        order = np.argsort(self.step, kind="stable")
        order = order[self.step[order] != UNPLACED]
        steps, starts = np.unique(self.step[order], return_index=True)
        longest = np.maximum.reduceat(self.took_s[order], starts) if len(steps) else steps
        return dict(zip(steps.tolist(), longest.tolist(), strict=True))


def _took_s(history: History, before_s: float = math.inf) -> Array:
    return np.concatenate([np.zeros(0), *(gaps.took_s for gaps in _gaps(history, before_s))])


def _gaps(history: History, before_s: float = math.inf) -> Iterator[_Gaps]:
    """Of the steps that ended by `before_s`, CLOCK_MONOTONIC; those of some ranks at a time."""
    for places in history.executions.by_ranks():
        steps = history.executions.at(places)
        attempt, rank, over_s = steps.attempt, steps.rank, steps.mono_s
        order = np.lexsort((over_s, rank, attempt))
        follows = (np.diff(attempt[order]) == 0) & (np.diff(rank[order]) == 0) & (over_s[order][1:] <= before_s)
        yield _Gaps(np.diff(over_s[order])[follows], steps.global_step[order[1:][follows]])
