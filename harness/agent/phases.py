"""The seconds of a step that the host spent in each phase. Time in a nested phase counts for the inner phase only."""

from __future__ import annotations

import time
from typing import Callable

from .wire import Phase


class Phases:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stack: list[Phase] = []
        self._since = 0.0
        self._loose: Phase | None = None
        self._seconds: dict[Phase, float] = {}

    def enter(self, phase: Phase) -> None:
        self._charge()
        self._loose = None
        self._stack.append(phase)

    def leave(self, phase: Phase) -> None:
        """End the innermost `phase` and all phases that were left open inside it. Does nothing if it is not open."""
        if phase in self._stack:
            self._charge()
            while self._stack.pop() is not phase:
                pass

    def loosely(self, phase: Phase) -> None:
        """`phase` lasts until the next one is entered: for a phase whose beginning can be seen, but not its end."""
        self._charge()
        self._loose = phase

    def take(self) -> dict[Phase, float]:
        """The seconds by phase since the last call, rounded to microseconds."""
        self._charge()
        taken, self._seconds = self._seconds, {}
        return {phase: round(seconds, 6) for phase, seconds in taken.items()}  # a Phase is a string

    def _charge(self) -> None:
        now = self._clock()
        phase = self._stack[-1] if self._stack else self._loose
        if phase is not None:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now
