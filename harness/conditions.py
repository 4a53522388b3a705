"""Conditions seen from the events so far: what must hold before a fault is injected, and what ends a run early. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchaos.harness.agent.wire import Event, Kind, Seconds

_STEPPED = (Kind.STEP, Kind.LOG_STEP)


@dataclass(frozen=True)
class Steps:
    """Every rank that is up has done so many steps in its attempt."""

    at_least: int

    name: ClassVar[str] = "steps"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        attempt = max((e.attempt for e in events if e.kind is Kind.STEP and e.attempt is not None), default=None)
        if attempt is None:
            return None
        done = {e.rank: e.step or 0 for e in events if e.kind is Kind.STEP and e.attempt == attempt}
        worlds = [e.data["world_size"] for e in events if e.kind is Kind.AGENT_STARTED and e.attempt == attempt]
        return len(done) >= max(worlds, default=1) and min(done.values()) >= self.at_least


@dataclass(frozen=True)
class LossBelow:
    """The newest loss of any rank is below a value."""

    value: float

    name: ClassVar[str] = "loss_below"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        losses = [
            loss for event in events if event.kind is Kind.STEP for loss in event.data["losses"] if loss is not None
        ]
        return losses[-1] < self.value if losses else None


@dataclass(frozen=True)
class NoProgress:
    """No rank has finished a step for so long. Unknown before the first step: start-up is the time-out's affair."""

    longer_than: Seconds

    name: ClassVar[str] = "no_progress"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        last = max((event.mono_s for event in events if event.kind in _STEPPED), default=None)
        return None if last is None else now_s - last > self.longer_than


@dataclass(frozen=True)
class Attempts:
    """The job has been started, restarts included, more often than this."""

    more_than: int

    name: ClassVar[str] = "attempts"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        attempts = [event.attempt for event in events if event.kind is Kind.RANK_UP and event.attempt is not None]
        return max(attempts) + 1 > self.more_than if attempts else None


@dataclass(frozen=True)
class Wall:
    """The job has been running for so long."""

    longer_than: Seconds

    name: ClassVar[str] = "wall"

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        start = next((event.mono_s for event in events if event.kind is Kind.JOB_STARTED), None)
        return None if start is None else now_s - start > self.longer_than
