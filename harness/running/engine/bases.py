"""Tells a restarted rank how many global steps lie behind it, so that a trigger finds its step again."""

from __future__ import annotations

from collections.abc import Sequence

from torchaos.harness.agent.plan import Moment
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history import base_of
from torchaos.harness.running.engine.arming import Slots

PATIENCE_S = 2 * Moment.hold_s


class BaseKeeper:
    """Writes the base of an attempt to the pages of orders that still wait for a step.

    The agent asks by waiting: after the first step of an attempt that loaded a checkpoint it looks for the word.
    Where the witnesses can't tell, nothing is written, and the trigger is missed: no guess.
    """

    def __init__(self, slots: Sequence[Slots]) -> None:
        self._slots = slots
        self._told: set[tuple[str, int, int]] = set()

    def update(self, events: Sequence[Event]) -> None:
        if not events or not self._slots:
            return
        since = events[-1].mono_s - PATIENCE_S  # nobody waits for an answer that comes later
        first_steps = {(e.rank, e.attempt) for e in events if e.kind is Kind.STEP and e.step == 1 and e.mono_s > since}
        for one in self._slots:
            for rank, page in one.pages.items():
                attempts = [attempt for stepped, attempt in first_steps if stepped == rank and attempt is not None]
                if not attempts or (one.fault.id, rank, max(attempts)) in self._told:
                    continue
                attempt = max(attempts)
                base, _witnesses = base_of(events, attempt)
                if base is not None:
                    page.write(page.BASE, base)
                    page.write(page.BASE_ATTEMPT, attempt)
                    self._told.add((one.fault.id, rank, attempt))
