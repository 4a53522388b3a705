"""Ends every process of a job, wherever it is in the process tree, stopped or not."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from torchaos.harness.machine import proc

Processes = Mapping[int, int]  # start times by pid

END_S = 30.0  # a rank that gives back pinned or GPU memory takes its time to die


def ask_to_end(processes: Processes, heads: Iterable[int]) -> None:
    """Sends SIGTERM to the started commands, which pass it on, and SIGCONT to all processes, because a stopped process
    can't act on SIGTERM."""
    for pid in (pid for pid in heads if pid in processes):
        _send(pid, processes[pid], signal.SIGTERM)
    for pid, ticks in processes.items():
        _send(pid, ticks, signal.SIGCONT)


def end(find: Callable[[], Processes]) -> list[int]:
    """Sends SIGKILL until `find` finds no process. Returns the pids that are left after END_S (stuck in the kernel)."""
    deadline = time.monotonic() + END_S
    while members := find():
        left = proc.kill(members, deadline)
        if left or time.monotonic() > deadline:
            return sorted(left or members)
    return []


def _send(pid: int, ticks: int, number: int) -> None:
    with suppress(OSError), proc.hold(pid, ticks) as fd:
        if fd is not None:
            signal.pidfd_send_signal(fd, number)
