"""The conditions of a run, and the probes that some of them bring, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torchaos.harness import registry
from torchaos.harness.agent.wire import Event
from torchaos.harness.contracts import Condition, Emit, Probe, Watched
from torchaos.harness.record.plan import Named, Plan
from torchaos.harness.running.conditions.observed import last_reason
from torchaos.harness.running.engine.seldom import Seldom

_LEAVE_S = 5.0


class Watches:
    """`steady`: whether no fault has to wait any more; `broken`: which stop condition holds, and why."""

    def __init__(self, plan: Plan, at: Watched, emit: Emit) -> None:
        self._steady, self._stop, self._at = _conditions(plan.steady_state), _conditions(plan.stop), at
        self._until = _conditions(plan.until)
        self._seldom, self._seldom_broken = Seldom(), Seldom()
        probes = {
            probe
            for one in (*self._steady.values(), *self._stop.values(), *self._until.values())
            for probe in one.probes(at)
        }  # fmt: skip
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
        return all(condition.holds(events, now_s) for condition in self._steady.values())

    def broken(self, events: Sequence[Event], now_s: float) -> tuple[str, bool] | None:
        """A sentence, and whether it says something about the job. Over a long run it becomes dear to tell, and is
        asked more seldom."""
        if not self._stop or not self._seldom_broken.due():
            return None
        with self._seldom_broken:
            name = next((name for name, one in self._stop.items() if one.holds(events, now_s)), None)
        if name is None:
            return None
        why = last_reason(events, name)
        return f"the stop condition {name} holds{f': {why}' if why else ''}", self._stop[name].about_job

    def enough(self, events: Sequence[Event], now_s: float) -> str | None:
        """What ends the run on purpose, in words. It may be dear to tell, so it is asked seldom."""
        if not self._until or not self._seldom.due():
            return None
        with self._seldom:
            holds = all(condition.holds(events, now_s) for condition in self._until.values())
        return f"enough was seen: {' and '.join(self._until)}" if holds else None

    def _look(self, probe: Probe, emit: Emit) -> None:
        while not self._at.ended.is_set():
            probe.sample(emit)
            self._at.ended.wait(probe.period_s)


def _conditions(named: tuple[Named, ...]) -> dict[str, Condition]:
    return {one.name: registry.find("conditions", one.name)(**one.params) for one in named}
