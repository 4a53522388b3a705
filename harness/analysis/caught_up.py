"""Finds when training really continued after a fault, at its usual pace. A single step is no proof: after an ECC error,
a job may finish a step before it drains its ranks, and a collective may stall a step later.

A *landing* is one hit of a fault. A *halt* is a step much longer than the usual step.

- The attempt that was hit continued if no restart followed, other than one caused by another landing. Training
continued with the step that ended the last halt or, without a halt, with the first new step after the fault took
effect. Only halts that began while the fault was on, or soon after, count.

- Otherwise a later attempt must get past all steps of the earlier attempts. An attempt does not count if it ended only
because the job got its lost node back.

- If the fault came after the last step, no further step can show that training continued. Then the checkpoint that was
not yet saved must become complete.

A job that lost a node because of a fault gets the node back when the fault ends, and torchelastic restarts the ranks.
That restart belongs to the recovery, however long the node takes to join. Each rollback causes at most one restart, and
only a restart that no other landing caused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchaos.harness.analysis.ending import aborts_at_exit
from torchaos.harness.analysis.hit_targets import Landing, RunSoFar, landings
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import final_path
from torchaos.harness.record.history import Attempt, Execution, Executions, History, Save, Segment
from torchaos.harness.record.steps.executions import UNPLACED

BACK = "back"  # `what` of an effect event: the injector itself ended the fault


def _is_way_back(event: Event) -> bool:
    return event.kind is Kind.ROLLED_BACK or (event.kind is Kind.EFFECT and event.data.get("what") == BACK)


def way_back_s(run: RunSoFar, landing: Landing, *kinds: Kind) -> float | None:
    """The time (CLOCK_MONOTONIC) at which the fault was taken off the job: by its rollback, or by the injector itself.
    None if it stayed."""
    back = (event for event in run.of_kind(*kinds) if _is_way_back(event))
    mine = [event.mono_s for event in back if event.data["fault"] == landing.fault and event.mono_s > landing.at_s]
    return min(mine, default=None)


def over_s(run: RunSoFar, landing: Landing, in_process: bool = False) -> float:
    """When the fault was over (CLOCK_MONOTONIC); infinite if it stayed. `in_process`: the fault lives in the processes
    that it hit. If the job was restarted, such a fault was over when the last of these processes had ended."""
    backs = [way_back_s(run, landing, Kind.ROLLED_BACK, Kind.EFFECT)]
    if in_process and landing.pids and any(attempt.number > landing.attempt for attempt in run.history.attempts):
        gone = {e.data["pid"]: e.mono_s for e in run.of_kind(Kind.RANK_EXITED) if e.data["pid"] in landing.pids}
        backs += [max(gone.values())] if gone.keys() == landing.pids else []
    return min((at for at in backs if at is not None and at > landing.at_s), default=math.inf)


def lasted_s(run: RunSoFar, landing: Landing, in_process: bool = False) -> float | None:
    """The seconds for which the fault was on, see over_s(). None if it was on until the job or the run ended."""
    end_s = over_s(run, landing, in_process)
    ends = [event.mono_s for event in run.of_kind(Kind.JOB_EXITED, Kind.STOPPED) if event.mono_s > landing.at_s]
    return None if end_s == math.inf or end_s > min(ends, default=end_s) else round(end_s - landing.at_s, 3)


def growths(run: RunSoFar) -> dict[int, Landing]:
    """The attempts that ended only because a fault was over and its ranks came back, so that the next attempt has more
    ranks. By attempt: the landing of that fault.

    Each rollback, in order of time, counts as the cause of the first such attempt that has no cause yet."""
    landed = landings(run)
    hit = {landing.attempt for landing in landed}
    grown = [
        (old.number, new.started_s) for old, new in pairwise(run.history.attempts)
        if new.world_size > old.world_size and old.number not in hit
    ]  # fmt: skip
    found: dict[int, Landing] = {}
    for back in filter(_is_way_back, run.of_kind(Kind.ROLLED_BACK, Kind.EFFECT)):
        before = [landing for landing in landed if landing.fault == back.data["fault"] and landing.at_s < back.mono_s]
        later = (
            number for number, ended_s in grown if before and number > before[-1].attempt and ended_s > back.mono_s
        )
        first = next((number for number in later if number not in found), None)
        if first is not None:
            found[first] = before[-1]
    return found


Array = npt.NDArray[Any]

# A halt is longer than each of these limits.
_TIMES = 10.0  # in usual steps
_LEAST_S = 1.0  # seconds; machines hesitate
_PAUSES = 3.0  # times a pause of the job itself, such as a checkpoint or an evaluation
_ENOUGH = 3  # steps that are needed to know the usual time


@dataclass(frozen=True)
class Pace:
    """The usual times from step to step."""

    usual_s: float  # the median; 0 if too few steps were seen
    pauses: Mapping[int, float]  # by global step: the longest time, in seconds, that a twin took for it
    longest_s: float  # the longest usual time between steps, for steps that no twin made

    @property
    def least_s(self) -> float:
        """The longest step, in seconds, that is never a halt: ten usual steps, but at least 1 s."""
        return max(_LEAST_S, _TIMES * self.usual_s)

    def is_halt(self, took_s: float, step: int | None) -> bool:
        """Whether a step that took `took_s` seconds is a halt. `step`: its global number; None: not known."""
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
    """Yields the gaps between the steps that ended by `before_s` (CLOCK_MONOTONIC), for a few ranks at a time."""
    for places in history.executions.by_ranks():
        steps = history.executions.at(places)
        attempt, rank, over_s = steps.attempt, steps.rank, steps.mono_s
        order = np.lexsort((over_s, rank, attempt))
        follows = (np.diff(attempt[order]) == 0) & (np.diff(rank[order]) == 0) & (over_s[order][1:] <= before_s)
        yield _Gaps(np.diff(over_s[order])[follows], steps.global_step[order[1:][follows]])


def owed(history: History, at_s: float, twins: Sequence[History]) -> frozenset[str]:
    """The files that the first twin saved after its last step and that this run had not completely saved at `at_s`
    (CLOCK_MONOTONIC). Empty if the run had not done its last step at that time, or made a step later; then steps show
    when the job continued."""
    last = twins[0].last_step if twins else None
    if last is None or not last == history.highest_step(before_s=at_s) == history.highest_step():
        return frozenset()
    wanted = {_name(save) for save in twins[0].saves if save.ok and save.global_step == last}
    return frozenset(wanted - {_name(save) for save in history.saves if _is_whole(save, last, 0.0, at_s)})


def made_good_s(history: History, at_s: float, names: frozenset[str]) -> float | None:
    """When the last of these files was complete (CLOCK_MONOTONIC). None if one of them never was."""
    last = history.highest_step() or 0
    ends: dict[str, float] = {}
    for save in history.saves:
        if _is_whole(save, last, at_s, float("inf")):
            ends.setdefault(_name(save), save.ended_s or 0.0)
    return max((ends[name] for name in names), default=None) if names <= ends.keys() else None


def _is_whole(save: Save, step: int, since_s: float, until_s: float) -> bool:
    return save.ok and save.global_step == step and save.ended_s is not None and since_s < save.ended_s <= until_s


def _name(save: Save) -> str:
    """The last two parts of the path. The rest differs, because a run and its twin have different folders."""
    return "/".join(final_path(save.path).split("/")[-2:])


_SOON = 5  # usual steps: a halt that begins at most this long after the rollback is still an effect of the fault
SETTLED = 3  # steps that must follow before a live run counts as recovered


class End(NamedTuple):
    """The end of a recovery: the attempt in which training continued, and the time (CLOCK_MONOTONIC)."""

    attempt: int
    mono_s: float


def went_on(
    run: RunSoFar, landing: Landing, *, lethal: bool, lasting: bool, twins: Sequence[History] = ()
) -> End | None:
    """The end of the recovery from one hit of a fault. None if training never continued. `lethal`: the fault kills its
    target, at once or after a grace period. `lasting`: the fault is on until its rollback."""
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
    """The steps of the attempt that was hit, after the fault and above the highest global step before the fault; in
    order of time. Only of the ranks that were hit; of all ranks if the fault hit no rank, or if the steps were read
    from a log.

    If that attempt went back to an earlier state before the next landing, the last return takes the place of the
    fault."""
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
    process of the job's command."""
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
    """When the rank that was hit reported an effect of the fault, because some faults change nothing in the step in
    which they are applied. If no rank reported an effect: the time of the landing."""
    told = (
        event.mono_s for event in run.of_kind(Kind.EFFECT)
        if event.data["fault"] == landing.fault and event.rank is not None and event.attempt == landing.attempt
    )  # fmt: skip
    return min((at for at in told if at >= landing.at_s), default=landing.at_s)


def _last_halt(own: Executions, until_s: float, pace: Pace) -> Execution | None:
    """The step that ended the last halt that began before `until_s` (CLOCK_MONOTONIC). None if there was no halt.
    `own`: steps in order of time."""
    over_s = own.mono_s
    long = np.flatnonzero((over_s[:-1] <= until_s) & (np.diff(over_s) > pace.least_s)) + 1
    steps = (own[place] for place in reversed(long.tolist()))
    ends = zip(steps, reversed((over_s[long] - over_s[long - 1]).tolist()), strict=False)
    return next((step for step, took_s in ends if pace.is_halt(took_s, step.global_step)), None)


def _later(run: RunSoFar, landing: Landing, until_s: float, last: int | None) -> Execution | None:
    """The first step of a later attempt above all steps of the attempt that was hit and of the attempts before it. An
    attempt does not count if it ended in a restart while the fault was on, or because the fault was over. `last`: the
    twins' last step. If the job died while it saved after this step, a repetition of the step counts."""
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
    """Whether another attempt follows, and its restart was caused neither by another landing after `since_s` nor by an
    abort at interpreter exit."""
    later: list[Attempt] = [attempt for attempt in run.history.attempts if attempt.number > number]
    others = [landing for landing in landings(run) if landing.attempt == number and landing.at_s > since_s]
    done = {abort.attempt for abort in aborts_at_exit(run)}
    return bool(later) and not others and number not in done
