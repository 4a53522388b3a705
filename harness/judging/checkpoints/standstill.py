"""For how long training stopped for each checkpoint, including the time in which the job waits for a save in another
thread.

A save that returns at once blocks only for the time of its call. But the job may still wait for its end. Then the rank
is in no phase of a step from the begin of the save to its end, and goes on when the save has ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from torchaos.harness.agent.wire import Phase
from torchaos.harness.record.history import Execution, History, Save
from torchaos.harness.record.history.checkpoints import blocked_by_step

_SOON_S, _SOON_SHARE = 0.05, 0.1  # seconds, and share of the save's length: a rank that goes on so soon has waited

Key = tuple[int, int]  # attempt, local steps before the save


@dataclass(frozen=True)
class Standstill:
    """Seconds without training, by checkpoint. `possible`: these seconds, plus all other time during the write in which
    a rank was in no phase of a step."""

    blocked: Mapping[Key, float]
    possible: Mapping[Key, float]


def standstill(history: History) -> Standstill:
    """The seconds without training for each checkpoint, from the steps and saves of a run."""
    saves = [save for save in history.saves if save.ended_s is not None]
    called = blocked_by_step(saves)
    blocked, possible = dict(called), dict(called)
    for gap in _gaps(history.executions):
        beside = [save for save in saves if save.attempt == gap.attempt and gap.holds_end_of(save)]
        if not beside:
            continue
        last = max(beside, key=lambda save: save.ended_s or 0.0)
        key, until = (last.attempt, last.local_step), last.ended_s or 0.0
        waited = min(gap.idle_s, until - max(gap.begun_s, min(save.begun_s for save in beside)))
        possible[key] = max(possible[key], waited)
        if gap.works_s - until <= gap.usual_s + gap.saving_s + _SOON_S + _SOON_SHARE * waited:
            blocked[key] = max(blocked[key], waited)
    return Standstill(blocked, possible)


@dataclass(frozen=True)
class _Gap:
    """The gap between two steps of a rank. Times are CLOCK_MONOTONIC, durations in seconds."""

    attempt: int
    step: int  # the local step that was over when the gap began
    begun_s: float
    works_s: float  # when the rank began to work on the next step, at the latest
    saving_s: float  # in calls that save
    idle_s: float  # in no phase of a step, beyond the usual
    usual_s: float

    def holds_end_of(self, save: Save) -> bool:
        ended_s = save.ended_s or 0.0
        return save.local_step <= self.step and self.begun_s <= ended_s <= self.works_s


def _gaps(executions: Sequence[Execution]) -> Iterator[_Gap]:
    of_ranks: dict[tuple[int, int], list[Execution]] = defaultdict(list)
    for execution in executions:
        of_ranks[execution.attempt, execution.rank].append(execution)
    for steps in of_ranks.values():
        pairs = [(old, new) for old, new in pairwise(steps) if new.local_step == old.local_step + 1 and new.phases]
        usual = median(_idle(old, new) for old, new in pairs) if pairs else 0.0
        for old, new in pairs:
            yield _Gap(
                old.attempt, old.local_step, old.mono_s, new.mono_s - _work(new), _saving(new),
                max(0.0, _idle(old, new) + _saving(new) - usual), usual,
            )  # fmt: skip


def _idle(old: Execution, new: Execution) -> float:
    return max(0.0, new.mono_s - old.mono_s - _work(new) - _saving(new))


def _work(step: Execution) -> float:
    return sum(step.phases.values()) - _saving(step)


def _saving(step: Execution) -> float:
    return step.phases.get(Phase.CHECKPOINT_WRITE.value, 0.0)
