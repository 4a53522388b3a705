"""The conditions about the job itself. They must hold before a fault (steady state), end a run early (stop), or end it
on purpose (until). `after_is_due` decides when a trigger from outside is due. All functions are pure.

The conditions read the events as they arrive. They count the steps that the agent reports in the newest attempt; in a
job without an agent, the steps in its log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from torchaos.harness import registry
from torchaos.harness.analysis.caught_up import has_settled, went_on
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.base_classes import DRAWN, Condition, Seconds
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.merged import Merged, RunEvents, beside_steps
from torchaos.harness.record.history import History
from torchaos.harness.record.history.history import is_down
from torchaos.harness.record.plan import After, PlannedFault
from torchaos.harness.record.steps.columns import is_absent, is_none
from torchaos.harness.record.steps.executions import UNPLACED


def after_is_due(
    trigger: After, events: Sequence[Event], now_s: float, history: Callable[[], History] | None = None
) -> bool:
    """Whether the trigger is due. `now_s`: CLOCK_MONOTONIC. `history`: a function that returns the history of these
    events, given by a caller that checks several triggers."""
    whole = Merged.of(events)
    if now_s < _launched_at(whole.beside_steps) + trigger.not_before_s:  # the cheapest check comes first
        return False
    start = _start_of(trigger, whole, history or partial(History.of, whole))
    if start is None:
        return False
    if trigger.checkpoints:
        saves = {  # a checkpoint may have several files
            (e.attempt, e.step): e.mono_s
            for e in whole.beside_steps
            if e.kind is Kind.SAVE_END and e.data["ok"] and e.rank == 0 and e.mono_s >= start
        }
        if len(saves) < trigger.checkpoints:
            return False
        start = list(saves.values())[trigger.checkpoints - 1]
    return now_s >= start + trigger.delay_s


def _launched_at(events: Sequence[Event]) -> float:
    return next((event.mono_s for event in events if event.kind is Kind.JOB_STARTED), math.inf)


def _start_of(trigger: After, whole: Merged, history: Callable[[], History]) -> float | None:
    events = whole.beside_steps
    if trigger.fault is None:
        launched = _launched_at(events)
        return launched if launched < math.inf else None
    hits = [e for e in events if e.kind is Kind.APPLYING and e.data["fault"] == trigger.fault]
    if not hits:
        missed = (e.mono_s for e in events if e.kind is Kind.MISSED and e.data["fault"] == trigger.fault)
        return next(missed, None) if trigger.state == "recovered" else None  # there is nothing to recover from
    at, pids = hits[0].mono_s, {hit.data["pid"] for hit in hits}
    if trigger.state == "applied":
        return at
    back = next((e.mono_s for e in events if e.kind is Kind.ROLLED_BACK and e.data["fault"] == trigger.fault), None)
    if trigger.state == "rolled_back":
        return back
    if trigger.state == "felt":
        return next(
            (e.mono_s for e in events if e.kind is Kind.RANK_EXITED and e.data["pid"] in pids and e.mono_s >= at), None
        )
    if (trigger.lasting and back is None) or not _stepped_since(whole, at, trigger.lethal):
        return None
    recovered = _recovered_at(Seen(whole, history()), trigger)
    return None if recovered is None else max(recovered, back or recovered) if trigger.lasting else recovered


@dataclass(frozen=True)
class Seen(RunEvents):
    """The present facts of a run, for conditions."""

    events: Sequence[Event]
    history: History


def _stepped_since(whole: Merged, at: float, lethal: bool) -> bool:
    """Whether a step has ended since the fault (the event `at`). If not, the job has not recovered, and the history,
    which is costly, is not needed."""
    steps = whole.steps_made
    hit = steps.at(steps.mono_s <= at).attempt.max(initial=0)  # the attempt that was hit, or a later one
    logged = (event for event in whole.beside_steps if event.kind is Kind.LOG_STEP and event.mono_s > at)
    return bool((steps.after(at).attempt > (hit if lethal else -1)).any()) or any(
        not lethal or event.attempt is None or event.attempt > hit for event in logged
    )


def _recovered_at(seen: Seen, trigger: After) -> float | None:
    """When the job had recovered from the first landing of the fault (CLOCK_MONOTONIC), by the rules of the verdict. If
    the attempt has survived the fault, some more steps must have ended in it, too. None if the job has not
    recovered."""
    landing = next(landed for landed in landings(seen) if landed.fault == trigger.fault)
    end = went_on(seen, landing, lethal=trigger.lethal, lasting=trigger.lasting)
    if end is None or (end.attempt == landing.attempt and not has_settled(seen.history, end)):
        return None
    return end.mono_s


Time = Annotated[Seconds, Field(gt=0)]
_LONG, _LEAST_S = 3.0, 10.0  # a job stands still after _LONG times its longest step, but not before _LEAST_S seconds


@dataclass(frozen=True)
class Steps(Condition):
    """Every rank has done at least `at_least` steps in the newest attempt."""

    at_least: PositiveInt

    name: ClassVar[str] = "steps"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        attempt, steps = _newest_attempt(events), Merged.of(events).steps
        own = steps["attempt"] == attempt
        ranks, of = np.unique(steps["rank"][own], return_inverse=True)
        size = _world_size(events, attempt)
        if len(ranks):
            done = np.zeros(len(ranks), np.int64)
            np.maximum.at(done, of, steps["local_step"][own])
            return None if size is None else bool(len(ranks) >= size and done.min() >= self.at_least)
        logged = [
            step for event in beside_steps(events)
            if event.kind is Kind.LOG_STEP and (step := event.data["step"]) is not None
        ]  # fmt: skip
        if logged:
            return bool(max(logged) >= self.at_least)
        return None if size is None else False


@dataclass(frozen=True)
class RanksUp(Condition):
    """Every rank of the job has a live process."""

    name: ClassVar[str] = "ranks_up"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        attempt = _newest_attempt(events)
        size = _world_size(events, attempt)
        if size is None:
            return None
        up: dict[int | None, int] = {}
        for event in beside_steps(events):
            if event.attempt != attempt:
                continue
            if event.kind is Kind.RANK_UP:
                up[event.rank] = event.data["pid"]
            elif event.kind is Kind.RANK_EXITED and up.get(event.rank) == event.data["pid"]:
                del up[event.rank]
        return len(up) >= size


@dataclass(frozen=True)
class LossBelow(Condition):
    """The newest loss of every rank that reports a loss is below `value`."""

    value: float

    name: ClassVar[str] = "loss_below"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        logged = {
            event.rank: loss for event in beside_steps(events)
            if event.kind is Kind.LOG_STEP and (loss := event.data.get("loss")) is not None
        }  # fmt: skip
        newest = [*_newest_losses(Merged.of(events)), *logged.values()]
        return all(loss < self.value for loss in newest) if newest else None  # NaN is not below


@dataclass(frozen=True)
class NoProgress(Condition):
    """No rank has ended a step for longer than `longer_than` seconds, after the first step of the job."""

    longer_than: Time

    name: ClassVar[str] = "no_progress"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        last_s = Merged.of(events).steps["mono_s"].max(initial=-math.inf)
        logged = (event.mono_s for event in beside_steps(events) if event.kind is Kind.LOG_STEP)
        last_s = max(float(last_s), max(logged, default=-math.inf))
        return now_s - last_s > self.longer_than if last_s > -math.inf else None


@dataclass(frozen=True)
class Attempts(Condition):
    """The job has been started more than `more_than` times; restarts and resubmissions both count."""

    more_than: PositiveInt

    name: ClassVar[str] = "attempts"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        newest = _newest_attempt(events)
        return None if newest is None else newest + 1 > self.more_than


@dataclass(frozen=True)
class Wall(Condition):
    """`longer_than` seconds have passed since the job was first started."""

    longer_than: Time

    name: ClassVar[str] = "wall"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        started = next((e.mono_s for e in beside_steps(events) if e.kind is Kind.JOB_STARTED), None)
        return None if started is None else now_s - started > self.longer_than


@dataclass(frozen=True)
class Recovered(Condition):
    """The job has recovered from every fault (or from the faults in `faults`), `rest` seconds have passed since then,
    and it still makes new steps."""

    rest: Seconds = 0.0
    faults: list[str] = field(default_factory=list)
    lasting: list[str] = field(default_factory=list, metadata={DRAWN: True})  # faults that must be undone first
    lethal: list[str] = field(default_factory=list, metadata={DRAWN: True})  # faults that kill their target

    name: ClassVar[str] = "recovered"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        whole = Merged.of(events)
        history = cache(lambda: History.of(whole))
        return all(
            after_is_due(self._of(fault), whole, now_s, history)
            for fault in reversed(self.faults)  # the last fault first: the check is cheap until it has landed
        ) and (not self.faults or self._goes_on(history(), whole, now_s))

    def _of(self, fault: str) -> After:
        return After(self.rest, fault, "recovered", lasting=fault in self.lasting, lethal=fault in self.lethal)

    def _goes_on(self, history: History, whole: Merged, now_s: float) -> bool:
        """Whether the job is alive and has ended a step at least `rest` seconds after it recovered. If the job dies
        again, the count starts again at its next recovery."""
        steps = new_steps(history)
        if (
            not steps
            or steps[-1] < steps[0] + self.rest
            or is_down(history, whole.beside_steps)
            or stands_still(steps, now_s)
        ):
            return False
        return all(after_is_due(self._of(fault), whole, steps[-1], lambda: history) for fault in self.faults)

    @staticmethod
    def of_faults(params: Mapping[str, Any], faults: Sequence[PlannedFault]) -> dict[str, Any]:
        """The parameters of the condition, completed: the faults for which it waits, and which of these last, and which
        kill. Raises UsageError if a named fault is not planned."""
        known = [fault.id for fault in faults]
        wanted = list(params.get("faults") or known)
        if strangers := [name for name in wanted if name not in known]:
            raise UsageError(f"recovered: there is no fault {strangers[0]!r}; there are {', '.join(known) or 'none'}")
        lasting = [fault.id for fault in faults if fault.id in wanted and fault.duration_s is not None]
        lethal = [fault.id for fault in faults if fault.id in wanted and registry.is_lethal(fault.inject)]
        return {"faults": wanted, "lasting": lasting, "lethal": lethal}


def _newest_attempt(events: Sequence[Event]) -> int | None:
    stepped = int(Merged.of(events).steps["attempt"].max(initial=-1))
    newest = max((event.attempt for event in beside_steps(events) if event.attempt is not None), default=-1)
    return None if max(stepped, newest) < 0 else max(stepped, newest)


def _world_size(events: Sequence[Event], attempt: int | None) -> int | None:
    starts = (Kind.AGENT_STARTED, Kind.RANK_UP)
    data = (event.data for event in beside_steps(events) if event.kind in starts and event.attempt == attempt)
    return next((size for started in data if (size := started.get("world_size")) is not None), None)


def _newest_losses(whole: Merged) -> list[float]:
    """The last known loss of each rank that reports losses."""
    steps = whole.steps_made.in_order_of_time
    seen = steps.at(_known(steps.column("losses")).any(1)).last_of("rank")
    losses = seen.column("losses")
    places = np.arange(losses.shape[1])
    return [float(row[places[known].max()]) for row, known in zip(losses, _known(losses), strict=True)]


def _known(losses: Any) -> Any:
    return ~(is_none(losses) | is_absent(losses))


def new_steps(history: History) -> list[float]:
    """The end times, in order, of the steps of the newest attempt that no earlier attempt had made. If the global
    numbers of its steps are not known, the end times of all its steps."""
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
