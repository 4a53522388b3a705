"""Evaluates the conditions of a run. Some conditions need probes; each probe has its own thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torchaos.harness import registry
from torchaos.harness.agent.wire import Event
from torchaos.harness.contracts import Condition, Emit, Probe, Watched
from torchaos.harness.record.plan import Named, Plan
from torchaos.harness.running.conditions.observed import last_reason
from torchaos.harness.running.engine.throttle import Throttle

_LEAVE_S = 5.0


class Watches:
    def __init__(self, plan: Plan, at: Watched, emit: Emit) -> None:
        self._steady, self._stop, self._at = _conditions(plan.steady_state), _conditions(plan.stop), at
        self._until = _conditions(plan.until)
        self._enough_throttle, self._broken_throttle = Throttle(), Throttle()
        conditions = (*self._steady.values(), *self._stop.values(), *self._until.values())
        probes = {probe for condition in conditions for probe in condition.probes(at)}
        self._threads = [
            threading.Thread(target=self._look, args=(probe, emit), name="condition", daemon=True) for probe in probes
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._at.ended.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_LEAVE_S)

    def steady(self, events: Sequence[Event], now_s: float) -> bool:
        """Whether all steady-state conditions hold, so that faults may be applied."""
        return all(condition.holds(events, now_s) for condition in self._steady.values())

    def broken(self, events: Sequence[Event], now_s: float) -> tuple[str, bool] | None:
        """The stop condition that holds now, as a clause, and whether the condition is about the job. None if no stop
        condition holds. The longer the run, the more seldom the conditions are checked."""
        if not self._stop or not self._broken_throttle.due():
            return None
        with self._broken_throttle:
            name = next((name for name, condition in self._stop.items() if condition.holds(events, now_s)), None)
        if name is None:
            return None
        why = last_reason(events, name)
        return f"the stop condition {name} holds{f': {why}' if why else ''}", self._stop[name].about_job

    def enough(self, events: Sequence[Event], now_s: float) -> str | None:
        """Why the run may end on purpose: all `until` conditions hold. None if they do not hold yet. The longer the
        run, the more seldom the conditions are checked."""
        if not self._until or not self._enough_throttle.due():
            return None
        with self._enough_throttle:
            holds = all(condition.holds(events, now_s) for condition in self._until.values())
        return f"enough was seen: {' and '.join(self._until)}" if holds else None

    def _look(self, probe: Probe, emit: Emit) -> None:
        while not self._at.ended.is_set():
            probe.sample(emit)
            self._at.ended.wait(probe.period_s)


def _conditions(named: tuple[Named, ...]) -> dict[str, Condition]:
    return {condition.name: registry.find("conditions", condition.name)(**condition.params) for condition in named}
