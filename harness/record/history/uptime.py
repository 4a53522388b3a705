"""Whether the job makes steps at a given time, or is down. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history.history import History
from torchaos.harness.record.steps.executions import UNPLACED

_DEATHS = (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE, Kind.NODE_EXITED, Kind.JOB_EXITED)
_LONG, _LEAST_S = 3.0, 10.0  # a halt lasts _LONG times the longest step, and _LEAST_S seconds


def is_down(history: History, events: Sequence[Event], at_s: float = math.inf) -> bool:
    """Whether the job was down at that time (seconds of CLOCK_MONOTONIC): the newest attempt had made no step, or one
    of its processes had died since its last step."""
    newest = history.attempt_at(at_s)
    if newest is None:
        return True
    steps = history.executions.of_attempt(newest.number)
    last = steps.at(steps.mono_s <= at_s).last_s()
    if last is None:
        return True
    since = [e for e in events if e.kind in _DEATHS and last < e.mono_s <= at_s and e.attempt in (None, newest.number)]
    return any(event.data.get("exit_code") != 0 for event in since)


def new_steps(history: History) -> list[float]:
    """The times, in order, of those steps of the newest attempt that no earlier attempt had made. If the global numbers
    of its steps are not known, the times of all its steps."""
    if not history.attempts:
        return []
    newest = history.attempts[-1]
    reached = max((attempt.last_step or 0 for attempt in history.attempts[:-1]), default=0)
    own = history.executions.of_attempt(newest.number)
    new = (own.global_step == UNPLACED) | (own.global_step > reached)
    found: list[float] = np.sort(own.mono_s[new]).tolist()
    return found


def stands_still(steps: Sequence[float], now_s: float) -> bool:
    """Whether the job has stopped: no step has ended for much longer than any of these steps took. `steps`: their end
    times, in order."""
    longest = max((after - before for before, after in pairwise(steps)), default=math.inf)
    return now_s - steps[-1] > max(_LEAST_S, _LONG * longest)
