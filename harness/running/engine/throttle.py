"""Limits how often a costly check is made, so that it takes at most 1/SHARE of a processor. CPU time is measured, not
time on the clock, so a busy machine does not make the check rarer."""

from __future__ import annotations

import time

SHARE = 10


class Throttle:
    """Decides when the check is due again. Use: `if throttle.due():`, then `with throttle:` around the costly code,
    whose CPU time is measured."""

    def __init__(self) -> None:
        self._spent_s = self._next_s = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next_s

    def __enter__(self) -> None:
        self._spent_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._next_s = time.monotonic() + SHARE * (time.thread_time() - self._spent_s)
