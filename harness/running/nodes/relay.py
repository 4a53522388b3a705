"""Passes signals from a scheduler on to a command, from before its start until after its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Relay:
    """A context manager for the main thread. A signal that comes before the command exists is passed on later. A signal
    after the command's end reaches no process, because it is sent through a pidfd and not to a pid."""

    def __init__(self) -> None:
        self.on_signal: Callable[[], None] = lambda: None  # called before a signal is passed on; must be quick
        self._pidfd: int | None = None
        self._waiting: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Relay:
        for number in _PASSED_ON:
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._pidfd is not None:
            os.close(self._pidfd)

    def to(self, pidfd: int) -> None:
        """Sends signals to this process from now on. The caller closes its own descriptor."""
        self._pidfd = os.dup(pidfd)
        for number in self._waiting:
            self.send(number)

    def send(self, number: int) -> None:
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self.on_signal()
        if self._pidfd is None:
            self._waiting.append(number)
        else:
            self.send(number)
