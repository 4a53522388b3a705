"""How long a step of this job takes when nothing is wrong, and what is too long for a step. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from torchaos.harness.record.history import Execution, History

_TIMES, _LEAST_S = 10.0, 1.0  # a halt lasts longer than so many usual steps, and longer than this: machines hesitate
_PAUSES = 3.0  # and longer than so many times the job's own pauses, such as checkpoints or evaluations
_ENOUGH = 3  # steps that show what is usual


@dataclass(frozen=True)
class Pace:
    usual_s: float  # from step to step, the median; 0 where too few were seen
    pauses: Mapping[int, float]  # by global step: the longest that a twin took to get there from the step before
    longest_s: float  # of all that was usual, for steps that no twin made

    def is_halt(self, took_s: float, step: int | None) -> bool:
        """Whether that is too long for the step that ended it; `step` None: for any step."""
        near = [self.pauses[n] for n in (step - 1, step, step + 1) if n in self.pauses] if step is not None else []
        pause_s = max(near, default=self.longest_s)
        return took_s > max(_LEAST_S, _TIMES * self.usual_s, _PAUSES * pause_s)


def pace_of(history: History, before_s: float, twins: Sequence[History] = ()) -> Pace:
    """From the steps that ended before the first fault (CLOCK_MONOTONIC), and from those of the twins."""
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
    """Each step that follows another one of the same rank and attempt, and the seconds between their ends."""
    ranks: dict[tuple[int, int], list[Execution]] = defaultdict(list)
    for one in history.executions:
        ranks[one.attempt, one.rank].append(one)
    for steps in ranks.values():
        ordered = sorted(steps, key=lambda one: one.mono_s)
        yield from ((b, b.mono_s - a.mono_s) for a, b in pairwise(ordered))
