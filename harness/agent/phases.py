"""The seconds of a step that the host spent in each phase. Time in a nested phase counts for the inner phase only."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Callable

from .wire import Phase


class Phases:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stack: list[Phase] = []
        self._since = 0.0
        self._loose: Phase | None = None
        self._seconds: defaultdict[Phase, float] = defaultdict(float)

    # `enter` and `leave` repeat the code of `_charge`, because they run in every step and a call would double their
    # cost.

    def enter(self, phase: Phase) -> None:
        now = self._clock()
        inner = self._stack[-1] if self._stack else self._loose
        if inner is not None:
            self._seconds[inner] += now - self._since
        self._since = now
        self._loose = None
        self._stack.append(phase)

    def leave(self, phase: Phase) -> None:
        """Ends the innermost `phase`, and all phases inside it that are still open. Does nothing if `phase` is not
        open."""
        if phase in self._stack:
            now = self._clock()
            self._seconds[self._stack[-1]] += now - self._since
            self._since = now
            while self._stack.pop() is not phase:
                pass

    def loosely(self, phase: Phase) -> None:
        """Enters a phase whose end can't be seen. It lasts until the next phase is entered."""
        self._charge()
        self._loose = phase

    def take(self) -> dict[Phase, float]:
        """The seconds by phase since the last call."""
        if self._stack or self._loose is not None:
            self._charge()
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    def _charge(self) -> None:
        now = self._clock()
        phase = self._stack[-1] if self._stack else self._loose
        if phase is not None:
            self._seconds[phase] += now - self._since
        self._since = now
