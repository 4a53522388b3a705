"""The site of a fault that is applied from outside: the processes and nodes of the job, as the harness sees them."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchaos.harness.interfaces import ChaosError, Emit, Handle, LiveNode
from torchaos.harness.protocol.wire import Phase, start_ticks


class TargetGone(ChaosError):
    """A target process has ended, or its pid belongs to another process now."""


@dataclass(frozen=True)
class Victim:
    """A process by pid and start time (clock ticks since boot), so that no other process is hit."""

    pid: int
    start_ticks: int
    rank: int | None  # None: a torchelastic agent
    attempt: int | None = None

    def open(self) -> int:
        """A pidfd of exactly this process. Raises TargetGone if the process has ended."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError as error:
            raise TargetGone(f"pid {self.pid} is gone") from error
        if start_ticks(self.pid) != self.start_ticks:
            os.close(fd)
            raise TargetGone(f"pid {self.pid} is another process by now")
        return fd


@dataclass(frozen=True)
class OutsideSite:
    """The site of a fault from outside; implements `interfaces.NodeSite`. `on_release`: lets the rank that is held at
    the Moment continue; it does nothing if no rank is held."""

    fault: str
    victims: Sequence[Victim]
    emit: Emit
    step: int | None = None
    phase: Phase | None = None
    on_release: Callable[[], None] = field(default=lambda: None)
    run_ended: threading.Event = field(default_factory=threading.Event)
    checkpoints: Path | None = None
    undo_copies: Path = Path(os.devnull)  # a dry run saves no copies
    nodes: Sequence[LiveNode] = ()
    cluster: Sequence[LiveNode] = ()
    endpoints: Mapping[str, Any] = field(default_factory=dict)
    undo_on_disk: Sequence[Handle] = ()

    @property
    def pids(self) -> Sequence[int]:
        return [victim.pid for victim in self.victims]

    def check(self, changes: Sequence[Handle]) -> None:
        for victim in self.victims:
            os.close(victim.open())
        if any(change not in self.undo_on_disk for change in changes):
            raise TargetGone(f"fault {self.fault} would change things whose undo is not on disk")

    def signal(self, number: int) -> None:
        """Sends the signal to all targets. Raises TargetGone if all of them have ended."""
        hit = [victim for victim in self.victims if _send(victim, number)]
        if not hit:
            raise TargetGone(f"pid {', '.join(str(pid) for pid in self.pids)}: gone before the fault could hit it")

    def release(self) -> None:
        self.on_release()

    def wait_for_exit(self, timeout_s: float) -> Sequence[int]:
        """Waits at most `timeout_s` seconds until the targets have ended. Returns the pids that are still alive. Raises
        ChaosError if the run ends before that, because then the targets must not be touched any more."""
        end = time.monotonic() + timeout_s
        while left := [victim.pid for victim in self.victims if not _exited(victim, 0.0)]:
            if time.monotonic() >= end:
                break
            if self.run_ended.is_set():
                raise ChaosError(f"the run ended during the wait for pid {left[0]}")
            _exited(next(victim for victim in self.victims if victim.pid == left[0]), min(0.1, end - time.monotonic()))
        return left


def _send(victim: Victim, number: int) -> bool:
    try:
        fd = victim.open()
    except TargetGone:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def _exited(victim: Victim, timeout_s: float) -> bool:
    try:
        fd = victim.open()
    except TargetGone:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)
