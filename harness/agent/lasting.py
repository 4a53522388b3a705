"""Faults in a rank that last until they are undone, or until their lease is over. To undo a fault, the harness, the
reaper or `torchaos recover` writes to its control page. The lease ends the fault if none of these is alive."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, Protocol

from .page import ControlPage, wait_until

if TYPE_CHECKING:
    from .calls import Call


class Lease:
    """The time during which one firing of a fault is on: from its creation until the fault is undone or `lease_s`
    seconds have passed."""

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
        """Sleeps at most `seconds` (None: until the lease ends), or until the fault is undone."""
        end = self._end if seconds is None else min(self._end, time.monotonic() + seconds)
        wait_until(lambda: not self.on, end)


class On(Protocol):
    @property
    def on(self) -> bool: ...


class Once:
    """A condition that stays true until its owner sets `on` to False."""

    on = True


class Lasting:
    """The functions that lasting faults run at each collective and after each step."""

    def __init__(self) -> None:
        self.on_calls: list[tuple[On, Callable[[Call], None]]] = []
        self.on_steps: list[tuple[On, Callable[[], None]]] = []

    def enter(self, call: Call) -> None:
        self.on_calls = [entry for entry in self.on_calls if entry[0].on]
        for _lease, then in self.on_calls:
            then(call)

    def step_over(self) -> None:
        self.on_steps = [entry for entry in self.on_steps if entry[0].on]
        for _lease, then in self.on_steps:
            then()
