"""Conditions that must hold before a fault (steady state), that end a run early (stop), or that end it on purpose
(until). All pure.

The conditions read the events as they arrive. They count the steps that the agent reports in the newest attempt; in a
job without an agent, the steps in its log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from torchaos.harness import registry
from torchaos.harness.agent.fault import DRAWN
from torchaos.harness.agent.quantities import Seconds
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.contracts import UsageError
from torchaos.harness.record.events.merged import Merged
from torchaos.harness.record.history import History
from torchaos.harness.record.history.uptime import is_down, new_steps, stands_still
from torchaos.harness.record.plan import After, PlannedFault
from torchaos.harness.running.conditions.due import after_is_due

Time = Annotated[Seconds, Field(gt=0)]


@dataclass(frozen=True)
class Steps:
    """Every rank has done at least `at_least` steps in the newest attempt."""

    at_least: PositiveInt

    name: ClassVar[str] = "steps"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        newest = _newest_attempt(events)
        done: dict[int | None, int] = {}
        for event in newest:
            if event.kind is Kind.STEP and event.step is not None:
                done[event.rank] = max(done.get(event.rank, 0), event.step)
        size = _world_size(newest)
        if done:
            return None if size is None else len(done) >= size and min(done.values()) >= self.at_least
        logged = [step for event in events if event.kind is Kind.LOG_STEP and (step := event.data["step"]) is not None]
        if logged:
            return bool(max(logged) >= self.at_least)
        return None if size is None else False


@dataclass(frozen=True)
class RanksUp:
    """Every rank of the job has a live process."""

    name: ClassVar[str] = "ranks_up"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        newest = _newest_attempt(events)
        size = _world_size(newest)
        if size is None:
            return None
        up: dict[int | None, int] = {}
        for event in newest:
            if event.kind is Kind.RANK_UP:
                up[event.rank] = event.data["pid"]
            elif event.kind is Kind.RANK_EXITED and up.get(event.rank) == event.data["pid"]:
                del up[event.rank]
        return len(up) >= size


@dataclass(frozen=True)
class LossBelow:
    """The newest loss of every rank that reports a loss is below `value`."""

    value: float

    name: ClassVar[str] = "loss_below"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        newest = {event.rank: loss for event in events for loss in _losses(event)}
        return all(loss < self.value for loss in newest.values()) if newest else None


@dataclass(frozen=True)
class NoProgress:
    """No rank has ended a step for longer than `longer_than` seconds, after the first step of the job."""

    longer_than: Time

    name: ClassVar[str] = "no_progress"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        steps = [event.mono_s for event in events if event.kind in (Kind.STEP, Kind.LOG_STEP)]
        return now_s - max(steps) > self.longer_than if steps else None


@dataclass(frozen=True)
class Attempts:
    """The job has been started more than `more_than` times; restarts and resubmissions both count."""

    more_than: PositiveInt

    name: ClassVar[str] = "attempts"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        seen = [event.attempt for event in events if event.attempt is not None]
        return max(seen) + 1 > self.more_than if seen else None


@dataclass(frozen=True)
class Wall:
    """`longer_than` seconds have passed since the job was first started."""

    longer_than: Time

    name: ClassVar[str] = "wall"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        started = next((event.mono_s for event in events if event.kind is Kind.JOB_STARTED), None)
        return None if started is None else now_s - started > self.longer_than


@dataclass(frozen=True)
class Recovered:
    """The job has recovered from every fault (or from the faults in `faults`), `rest` seconds have passed since then,
    and it still makes new steps."""

    rest: Seconds = 0.0
    faults: list[str] = field(default_factory=list)
    lasting: list[str] = field(default_factory=list, metadata={DRAWN: True})  # faults that must be undone first
    lethal: list[str] = field(default_factory=list, metadata={DRAWN: True})

    name: ClassVar[str] = "recovered"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        whole = Merged.of(events)
        history = cache(lambda: History.of(whole))
        return all(
            after_is_due(self._of(fault), whole, now_s, history)
            for fault in reversed(self.faults)  # as long as the last fault has not landed, this is cheap
        ) and (not self.faults or self._goes_on(history(), whole, now_s))

    def _of(self, fault: str) -> After:
        return After(self.rest, fault, "recovered", lasting=fault in self.lasting, lethal=fault in self.lethal)

    def _goes_on(self, history: History, whole: Merged, now_s: float) -> bool:
        """Whether the job is alive and has ended a step at least `rest` seconds after it recovered. If the job dies
        again, the seconds are counted again from its next recovery."""
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
        """The parameters of the condition, completed: the faults that it waits for, and which of them last and which
        kill. Raises UsageError if a named fault is not planned."""
        known = [fault.id for fault in faults]
        wanted = list(params.get("faults") or known)
        if strangers := [name for name in wanted if name not in known]:
            raise UsageError(f"recovered: there is no fault {strangers[0]!r}; there are {', '.join(known) or 'none'}")
        lasting = [fault.id for fault in faults if fault.id in wanted and fault.duration_s is not None]
        lethal = [fault.id for fault in faults if fault.id in wanted and registry.is_lethal(fault.inject)]
        return {"faults": wanted, "lasting": lasting, "lethal": lethal}


def _newest_attempt(events: Sequence[Event]) -> list[Event]:
    newest = max((event.attempt for event in events if event.attempt is not None), default=None)
    return [event for event in events if event.attempt is not None and event.attempt == newest]


def _world_size(events: Iterable[Event]) -> int | None:
    sizes = (event.data for event in events if event.kind in (Kind.AGENT_STARTED, Kind.RANK_UP))
    return next((size for data in sizes if (size := data.get("world_size")) is not None), None)


def _losses(event: Event) -> list[float]:
    """The last loss of the event, in a list, if it has one. NaN counts as infinite."""
    losses: Sequence[Any] = ()
    if event.kind in (Kind.STEP, Kind.LOSS):
        losses = event.data["losses"] or ()
    elif event.kind is Kind.LOG_STEP:
        losses = (event.data.get("loss"),)
    known = [float(loss) for loss in losses if loss is not None]
    return [math.inf if math.isnan(known[-1]) else known[-1]] if known else []
