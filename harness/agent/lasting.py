"""Faults in a rank that last: until they are taken back, or until their lease is over.

Whoever takes a fault back (harness, reaper, `torchaos recover`) writes it into its control page; nothing else is
needed for the rank to go on. The lease is there for the case that all of them are gone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable

from .page import ControlPage

if TYPE_CHECKING:
    from .calls import Call

_STEP_S = 0.0005  # how often a page is looked at while the rank waits; the interpreter lock is free meanwhile


class Lease:
    """One firing of a fault: on from its making until it is taken back or the time is over."""

    def __init__(self, page: ControlPage, path: str, lease_s: float) -> None:
        self._page, self.control, self.number = page, path, page.read(ControlPage.FIRED)
        self._end = time.monotonic() + lease_s

    @property
    def on(self) -> bool:
        return time.monotonic() < self._end and self._page.read(ControlPage.GO) < self.number

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def sleep(self, seconds: float | None = None) -> None:
        """At most so long (None: as long as it lasts); returns at once when the fault is taken back."""
        end = self._end if seconds is None else min(self._end, time.monotonic() + seconds)
        while self.on and (left := end - time.monotonic()) > 0:
            time.sleep(min(_STEP_S, left))


class Lasting:
    """What faults that are on do at each collective and after each step."""

    def __init__(self) -> None:
        self.on_calls: list[tuple[Lease, Callable[[Call], None]]] = []
        self.on_steps: list[tuple[Lease, Callable[[], None]]] = []

    def enter(self, call: Call) -> None:
        self.on_calls = [one for one in self.on_calls if one[0].on]
        for _lease, then in self.on_calls:
            then(call)

    def step_over(self) -> None:
        self.on_steps = [one for one in self.on_steps if one[0].on]
        for _lease, then in self.on_steps:
            then()
