"""Tells a restarted rank from which global step it resumed (its base), so that a trigger can count global steps."""

from __future__ import annotations

from collections.abc import Sequence

from torchaos.harness.agent.plan import Moment
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history import base_of
from torchaos.harness.running.engine.arming import Slots

PATIENCE_S = 2 * Moment.hold_s


class BaseWriter:
    """Writes the base of each attempt to the control pages of faults.

    After the first step of an attempt that loaded a checkpoint, the agent waits for the base to appear on the page. If
    the witnesses do not show the base, nothing is written, and the trigger is missed. The base is never guessed."""

    def __init__(self, slots: Sequence[Slots]) -> None:
        self._slots = slots
        self._written: set[tuple[str, int, int]] = set()

    def update(self, events: Sequence[Event]) -> None:
        """Writes the bases that became known with these events, all events of the run so far."""
        if not events or not self._slots:
            return
        since = events[-1].mono_s - PATIENCE_S  # no rank waits longer for an answer
        first_steps = {(e.rank, e.attempt) for e in events if e.kind is Kind.STEP and e.step == 1 and e.mono_s > since}
        for slots in self._slots:
            for rank, page in slots.pages.items():
                attempts = [attempt for stepped, attempt in first_steps if stepped == rank and attempt is not None]
                if not attempts or (slots.fault.id, rank, max(attempts)) in self._written:
                    continue
                attempt = max(attempts)
                base, _witnesses = base_of(events, attempt)
                if base is not None:
                    page.write(page.BASE, base)
                    page.write(page.BASE_ATTEMPT, attempt)
                    self._written.add((slots.fault.id, rank, attempt))
