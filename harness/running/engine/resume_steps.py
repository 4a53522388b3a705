"""Tells a restarted rank from which global step it resumed (its base), so that a trigger can count global steps."""

from __future__ import annotations

from collections.abc import Sequence

from torchaos.harness.agent.agent_plan import Moment
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history import base_of
from torchaos.harness.running.engine.fault_life import Slots

PATIENCE_S = 2 * Moment.hold_s


class BaseWriter:
    """Writes the base of each attempt to the control pages of faults.

    After the first step of an attempt that loaded a checkpoint, the agent waits for the base to appear on the page. If
    the witnesses do not show the base, nothing is written, and the trigger is missed. The base is never guessed."""

    def __init__(self, slots: Sequence[Slots]) -> None:
        self._pages = [(rank, page) for slots_ in slots for rank, page in slots_.pages.items()]
        self._ranks = {rank for rank, _page in self._pages}
        self._waiting: dict[int, Event] = {}  # by rank: the first step of its newest attempt, without an answer

    def note(self, event: Event) -> None:
        """Must be called with each event of the run."""
        if event.kind is Kind.STEP and event.step == 1 and event.attempt is not None and event.rank in self._ranks:
            earlier = self._waiting.get(event.rank)
            if earlier is None or (earlier.attempt or 0) <= event.attempt:
                self._waiting[event.rank] = event

    def update(self, events: Sequence[Event]) -> None:
        """Writes the bases that became known with these events, all events of the run so far."""
        bases: dict[int, int | None] = {}
        for rank, first in list(self._waiting.items()) if events else ():
            attempt = first.attempt or 0
            if events[-1].mono_s - PATIENCE_S > first.mono_s:  # no rank waits longer for an answer
                self._waiting.pop(rank)
                continue
            if attempt not in bases:
                bases[attempt] = base_of(events, attempt)[0]
            if (base := bases[attempt]) is not None:
                self._waiting.pop(rank)
                for page in (page for number, page in self._pages if number == rank):
                    page.write(page.BASE, base)
                    page.write(page.BASE_ATTEMPT, attempt)
