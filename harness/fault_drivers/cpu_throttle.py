"""Lets processes run only for a share of the time.

    python cpu_throttle.py SHARE PID:START_TICKS ...

Each process is identified by a pidfd, so that no later process with the same pid is hit. This program ends when all
these processes have ended, or when it is killed; the undo of the fault then continues the stopped processes. It is run
by its path and imports only the standard library."""

from __future__ import annotations

import os
import signal
import sys
import time

PERIOD_S = 0.25


def main(share: float, names: list[str]) -> None:
    fds = [fd for name in names if (fd := _open(*map(int, name.split(":")))) is not None]
    print("ready", flush=True)
    while fds:
        fds = [fd for fd in fds if _send(fd, signal.SIGSTOP)]
        time.sleep(PERIOD_S * (1 - share))
        fds = [fd for fd in fds if _send(fd, signal.SIGCONT)]
        time.sleep(PERIOD_S * share)


def _open(pid: int, ticks: int) -> int | None:
    try:
        fd = os.pidfd_open(pid)
        with open(f"/proc/{pid}/stat", "rb") as file:
            same = int(file.read().rpartition(b")")[2].split()[19]) == ticks
    except (OSError, IndexError):
        return None
    return fd if same else None


def _send(fd: int, number: int) -> bool:
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
