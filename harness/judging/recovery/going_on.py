"""Finds when training really continued after a fault. A single step is no proof: after an ECC error, a job may finish a
step before it drains its ranks, and a collective may stall a step later.

- The attempt that was hit continued if it did not end in a restart, except a restart that another landing explains.
  Training continued with the step that ended the last halt; without a halt, with the first new step after the fault
  took effect. Only halts that began while the fault was on, or soon after, count.
- Otherwise a later attempt must get past all steps of the earlier attempts. An attempt does not count if it ended only
  because the job got its lost node back.
- If the fault came after the last step, no further step can show it. Then the checkpoint that was not yet saved must
  become complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchaos.harness.agent.wire import Kind
from torchaos.harness.judging.ending.teardown import aborts_at_exit
from torchaos.harness.judging.landing.landings import Landing, RunSoFar, landings
from torchaos.harness.judging.recovery.last_save import made_good_s, owed
from torchaos.harness.judging.recovery.pace import Pace, pace_of
from torchaos.harness.judging.recovery.ways_back import growths, way_back_s
from torchaos.harness.record.history import Attempt, Execution, Executions, History, Segment

_SOON = 5  # usual steps: a halt that begins this soon after the rollback is still an effect of the fault
SETTLED = 3  # steps that must follow before a live run counts as gone on


class End(NamedTuple):
    """The end of a recovery: the attempt in which training continued, and the time (CLOCK_MONOTONIC)."""

    attempt: int
    mono_s: float


def went_on(
    run: RunSoFar, landing: Landing, *, lethal: bool, lasting: bool, twins: Sequence[History] = ()
) -> End | None:
    """When training continued after a landing. None if it never did. `lethal`: the target dies, at once or after a
    grace period. `lasting`: the fault is on until its rollback."""
    history = run.history
    if names := owed(history, landing.at_s, twins):
        whole_s = made_good_s(history, landing.at_s, names)
        alive = None if whole_s is None else history.attempt_at(whole_s)
        return End(alive.number, whole_s) if alive and whole_s is not None else None
    pace = pace_of(history, landings(run)[0].at_s, twins)
    until_s = _until(run, landing, lasting, pace)
    step = None if lethal else _within(run, landing, until_s, pace)
    if step is None:
        last = max((twin.last_step or 0 for twin in twins), default=None)
        back = _later(run, landing, until_s, last)
        step = _past_halts(run, landing, back, pace) if back else None
    return End(step.attempt, step.mono_s) if step else None


def has_settled(history: History, end: End) -> bool:
    """Whether enough steps follow the end of the recovery. Only needed for a live run."""
    later = history.executions.at(
        (history.executions.attempt == end.attempt) & (history.executions.mono_s > end.mono_s)
    )
    return max(Counter(later.rank.tolist()).values(), default=0) >= SETTLED


def highest_up_to(history: History, attempt: int) -> int | None:
    """The highest global step of all attempts up to this attempt."""
    upto = (each.last_step for each in history.attempts if each.number <= attempt)
    reached = [step for step in upto if step is not None]
    return max(reached, default=None)


def steps_beyond(run: RunSoFar, landing: Landing) -> Executions:
    """The steps of the target, in the attempt that was hit, above the highest step before the fault. If the attempt
    loaded a checkpoint again, above the highest step before that load."""
    since_s = max((segment.started_s for segment in put_back(run, landing)), default=landing.at_s)
    before = run.history.highest_step(before_s=since_s) or 0
    any_rank = not landing.ranks or run.history.source == "log"  # a log shows the steps of a single rank
    steps = run.history.executions.of_attempt(landing.attempt)
    steps = steps.at((steps.mono_s > since_s) & (steps.global_step > before))
    own = steps if any_rank else steps.at(np.isin(steps.rank, list(landing.ranks)))
    return own.at(np.argsort(own.mono_s, kind="stable"))


def put_back(run: RunSoFar, landing: Landing) -> list[Segment]:
    """The parts of the hit attempt that began with a load of a checkpoint in the training loop. Only loads count that
    came after this landing and before the next landing."""
    others = [other.at_s for other in landings(run) if other.at_s > landing.at_s]
    return run.history.put_back(landing.attempt, landing.at_s, min(others, default=float("inf")))


def _within(run: RunSoFar, landing: Landing, until_s: float, pace: Pace) -> Execution | None:
    """The step with which the attempt that was hit continued. None if it did not continue, or if the fault hit the
    job's command."""
    if landing.pids & {event.data["pid"] for event in run.of_kind(Kind.JOB_STARTED)}:
        return None
    own = steps_beyond(run, landing)
    if not own or _ended_in_a_restart(run, landing.attempt, landing.at_s):
        return None
    stopped_s = next((event.mono_s for event in run.of_kind(Kind.STOPPED)), None)
    if stopped_s is not None and own[-1].mono_s <= until_s and pace.is_halt(stopped_s - own[-1].mono_s, None):
        return None
    told_s = _told_s(run, landing)
    affected = own.at(own.mono_s > told_s)
    return _last_halt(own, until_s, pace) or (affected[0] if affected else own[-1])


def _told_s(run: RunSoFar, landing: Landing) -> float:
    """When the rank that was hit told that the fault took effect in it: some faults change nothing in the step in which
    they are applied. The time of the landing if no rank told it."""
    told = (
        event.mono_s for event in run.of_kind(Kind.EFFECT)
        if event.data["fault"] == landing.fault and event.rank is not None and event.attempt == landing.attempt
    )  # fmt: skip
    return min((at for at in told if at >= landing.at_s), default=landing.at_s)


def _last_halt(own: Executions, until_s: float, pace: Pace) -> Execution | None:
    """The step that ended the last halt which began before `until_s` (CLOCK_MONOTONIC). `own`: steps in order of
    time."""
    over_s = own.mono_s
    long = np.flatnonzero((over_s[:-1] <= until_s) & (np.diff(over_s) > pace.least_s)) + 1
    steps = (own[place] for place in reversed(long.tolist()))
    ends = zip(steps, reversed((over_s[long] - over_s[long - 1]).tolist()), strict=False)
    return next((step for step, took_s in ends if pace.is_halt(took_s, step.global_step)), None)


def _later(run: RunSoFar, landing: Landing, until_s: float, last: int | None) -> Execution | None:
    """The first step of a later attempt above all steps of the attempt that was hit and of the attempts before it. An
    attempt does not count if it ended in a restart while the fault was on, or because the fault was over. In a job that
    died in its last save, a repetition of the twins' last step (`last`) counts."""
    history, attempt, grew = run.history, landing.attempt, growths(run)
    while True:
        reached = highest_up_to(history, attempt) or 0
        due = reached + (last is None or reached < last)
        steps = history.executions
        beyond = steps.at((steps.attempt > attempt) & (np.maximum(steps.global_step, 0) >= due))
        if not len(beyond):
            return None
        back = beyond[int(beyond.mono_s.argmin())]
        last_s = steps.of_attempt(back.attempt).last_s() or 0.0
        its_own = grew[back.attempt] == landing if back.attempt in grew else last_s <= until_s
        if not its_own or not _ended_in_a_restart(run, back.attempt, landing.at_s):
            return back
        attempt = back.attempt


def _past_halts(run: RunSoFar, landing: Landing, back: Execution, pace: Pace) -> Execution:
    """The step that ends the last halt that began soon after step `back` and before any other fault. `back` if there
    was no halt."""
    others = _other_faults_s(run, landing)
    soon_s = min([back.mono_s + _SOON * pace.usual_s, *(at_s for at_s in others if at_s > back.mono_s)])
    steps = run.history.executions.of_attempt(back.attempt)
    own = steps.at((steps.rank == back.rank) & (steps.mono_s >= back.mono_s))
    return _last_halt(own, soon_s, pace) or back


def _until(run: RunSoFar, landing: Landing, lasting: bool, pace: Pace) -> float:
    """The time (CLOCK_MONOTONIC) until which a halt must begin to count as an effect of this landing."""
    off_s = way_back_s(run, landing, Kind.EFFECT)
    if off_s is None:
        off_s = way_back_s(run, landing, Kind.ROLLED_BACK) if lasting else landing.at_s
    off_s = float("inf") if off_s is None else off_s
    return min([off_s + _SOON * pace.usual_s, *_other_faults_s(run, landing)])


def _other_faults_s(run: RunSoFar, landing: Landing) -> list[float]:
    """The times (CLOCK_MONOTONIC) at which other faults landed after this landing."""
    return [other.at_s for other in landings(run) if other.at_s > landing.at_s and other.fault != landing.fault]


def _ended_in_a_restart(run: RunSoFar, number: int, since_s: float) -> bool:
    """Whether another attempt follows, and neither another landing after `since_s` nor an abort at interpreter exit
    explains it."""
    later: list[Attempt] = [attempt for attempt in run.history.attempts if attempt.number > number]
    others = [landing for landing in landings(run) if landing.attempt == number and landing.at_s > since_s]
    done = {abort.attempt for abort in aborts_at_exit(run)}
    return bool(later) and not others and number not in done
