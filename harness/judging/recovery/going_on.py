"""When training really went on after a fault. Pure.

One more step is no proof: after an ECC error a job may end a step before it drains its ranks, and a collective may
stall a step later. So the attempt that was hit goes on by itself only if it does not end in a restart that no other
landing explains. It has gone on with the step that ends the last halt, of those that begin while the fault is on or
soon after. Otherwise a later attempt has to get past all steps of the earlier ones; one that ends because the job grows
again, now that the fault is over, has not. After the last step there is none to get past: then what the job still had
to save has to become whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torchaos.harness.agent.wire import Kind
from torchaos.harness.judging.ending.teardown import aborts_at_exit
from torchaos.harness.judging.landing.landings import Landing, Told, landings
from torchaos.harness.judging.recovery.last_save import made_good_s, owed
from torchaos.harness.judging.recovery.pace import Pace, pace_of
from torchaos.harness.judging.recovery.ways_back import growths, way_back_s
from torchaos.harness.record.history import Attempt, Execution, History, Segment

_SOON = 5  # usual steps: a halt that begins so soon after the fault was taken back is still its doing
SETTLED = 3  # steps that have to follow before a live run is said to have gone on


class End(NamedTuple):
    """Of a recovery."""

    attempt: int
    mono_s: float


def went_on(told: Told, landing: Landing, *, lethal: bool, lasting: bool, twins: Sequence[History] = ()) -> End | None:
    """When training went on; None where it never did. `lethal`: who is hit dies of it, at once or after a grace period;
    `lasting`: the fault is on until it is taken back."""
    history = told.history
    if names := owed(history, landing.at_s, twins):
        whole_s = made_good_s(history, landing.at_s, names)
        alive = None if whole_s is None else history.attempt_at(whole_s)
        return End(alive.number, whole_s) if alive and whole_s is not None else None
    pace = pace_of(history, landings(told)[0].at_s, twins)
    until_s = _until(told, landing, lasting, pace)
    step = None if lethal else _within(told, landing, until_s, pace)
    if step is None:
        last = max((twin.last_step or 0 for twin in twins), default=None)
        back = _later(told, landing, until_s, last)
        step = _past_halts(told, landing, back, pace) if back else None
    return End(step.attempt, step.mono_s) if step else None


def has_settled(history: History, end: End) -> bool:
    """Whether enough steps follow for a run that goes on still; a later attempt does not die of the fault."""
    after = Counter(one.rank for one in history.executions if one.attempt == end.attempt and one.mono_s > end.mono_s)
    return max(after.values(), default=0) >= SETTLED


def highest_up_to(history: History, attempt: int) -> int | None:
    reached = [one.last_step for one in history.attempts if one.number <= attempt and one.last_step is not None]
    return max(reached, default=None)


def steps_beyond(told: Told, landing: Landing) -> list[Execution]:
    """Those that the target itself made in the attempt that was hit, beyond the highest step before the fault; where it
    loaded a checkpoint again, beyond the highest before that."""
    since_s = max((one.started_s for one in put_back(told, landing)), default=landing.at_s)
    before = told.history.highest_step(before_s=since_s) or 0
    anybody = not landing.ranks or told.history.source == "log"  # a log tells of one rank
    own = [
        one for one in told.history.executions
        if one.attempt == landing.attempt and one.mono_s > since_s and (one.global_step or 0) > before
        and (anybody or one.rank in landing.ranks)
    ]  # fmt: skip
    return sorted(own, key=lambda one: one.mono_s)


def put_back(told: Told, landing: Landing) -> list[Segment]:
    """Where the attempt that was hit loaded a checkpoint again and went on from it, before anything else hit it."""
    others = [one.at_s for one in landings(told) if one.at_s > landing.at_s]
    return told.history.put_back(landing.attempt, landing.at_s, min(others, default=float("inf")))


def _within(told: Told, landing: Landing, until_s: float, pace: Pace) -> Execution | None:
    if landing.pids & {event.data["pid"] for event in told.events if event.kind is Kind.JOB_STARTED}:
        return None
    own = steps_beyond(told, landing)
    if not own or _ended_in_a_restart(told, landing.attempt, landing.at_s):
        return None
    stopped_s = next((event.mono_s for event in told.events if event.kind is Kind.STOPPED), None)
    if stopped_s is not None and own[-1].mono_s <= until_s and pace.is_halt(stopped_s - own[-1].mono_s, None):
        return None
    halts = [
        b for a, b in pairwise(own)
        if a.mono_s <= until_s and pace.is_halt(b.mono_s - a.mono_s, b.global_step)
    ]  # fmt: skip
    return halts[-1] if halts else own[0]


def _later(told: Told, landing: Landing, until_s: float, last: int | None) -> Execution | None:
    """The first step beyond all of the attempt that was hit and those before it, in an attempt that did not itself end
    in a restart while the fault was on, or because it was over. If the `last` step of the twins had been done, as by a
    job that died in its last save, that step done again."""
    history, attempt, grew = told.history, landing.attempt, growths(told)
    while True:
        reached = highest_up_to(history, attempt) or 0
        due = reached + (last is None or reached < last)
        beyond = [one for one in history.executions if one.attempt > attempt and (one.global_step or 0) >= due]
        back = min(beyond, key=lambda one: one.mono_s, default=None)
        if back is None:
            return None
        last_s = max(one.mono_s for one in history.executions if one.attempt == back.attempt)
        its_own = grew[back.attempt] == landing if back.attempt in grew else last_s <= until_s
        if not its_own or not _ended_in_a_restart(told, back.attempt, landing.at_s):
            return back
        attempt = back.attempt


def _past_halts(told: Told, landing: Landing, back: Execution, pace: Pace) -> Execution:
    """The step that ends the last halt, of those that begin soon after the job came back and before any other fault."""
    others = [one.at_s for one in landings(told) if one.at_s > landing.at_s and one.fault != landing.fault]
    soon_s = min([back.mono_s + _SOON * pace.usual_s, *(at_s for at_s in others if at_s > back.mono_s)])
    own = [
        one for one in told.history.executions
        if (one.attempt, one.rank) == (back.attempt, back.rank) and one.mono_s >= back.mono_s
    ]  # fmt: skip
    halts = [b for a, b in pairwise(own) if a.mono_s <= soon_s and pace.is_halt(b.mono_s - a.mono_s, b.global_step)]
    return halts[-1] if halts else back


def _until(told: Told, landing: Landing, lasting: bool, pace: Pace) -> float:
    """Until when a halt that begins is put down to this landing, CLOCK_MONOTONIC."""
    off_s = way_back_s(told, landing, Kind.EFFECT)
    if off_s is None:
        off_s = way_back_s(told, landing, Kind.ROLLED_BACK) if lasting else landing.at_s
    off_s = float("inf") if off_s is None else off_s
    others = [one.at_s for one in landings(told) if one.at_s > landing.at_s and one.fault != landing.fault]
    return min([off_s + _SOON * pace.usual_s, *others])


def _ended_in_a_restart(told: Told, number: int, since_s: float) -> bool:
    """Whether another attempt follows, and nothing else that hit this one explains that: no other landing since, nor
    that it was done and aborted on its way out."""
    later: list[Attempt] = [one for one in told.history.attempts if one.number > number]
    others = [one for one in landings(told) if one.attempt == number and one.at_s > since_s]
    done = {abort.attempt for abort in aborts_at_exit(told)}
    return bool(later) and not others and number not in done
