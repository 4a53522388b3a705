"""Handles SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from torchaos.harness.running.housekeeping import is_halted


class Endable(Protocol):
    def stop(self, reason: str) -> None: ...
    def hurry(self, reason: str) -> None: ...


class Interrupt:
    """The signal handlers. After a signal, the current run is ended in order, rolled back and judged, and no other run
    starts. After a second signal, the job gets no grace period and no more evidence is collected; the rollback is still
    complete."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._target: Endable | None = None

    def ends(self, target: Endable) -> None:
        """Makes signals end this run from now on. If a signal came just before, the run is ended at once."""
        self._target = target
        if self.reason:
            target.stop(self.reason)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, self.reason = self.reason is not None, self.reason or f"{_sender(number)} ended it"
        if self._target:
            self._target.hurry(self.reason) if again else self._target.stop(self.reason)


def _sender(number: int) -> str:
    if is_halted():
        return "torchaos halt"
    name = signal.Signals(number).name
    return f"Ctrl-C ({name})" if number == signal.SIGINT and _has_terminal() else name


def _has_terminal() -> bool:
    """Whether somebody may have pressed Ctrl-C: a run that pytest started has no terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


@contextmanager
def signals() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup: the run outlives its terminal
        wanted.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in wanted}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
