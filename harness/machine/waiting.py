"""Waits for a child process in the main thread without blocking signal handlers."""

from __future__ import annotations

import os
import select
import subprocess
from typing import Any

_LOOK_MS = 500  # milliseconds


def wait_for(process: subprocess.Popen[Any]) -> int:
    """Waits for the process and returns its exit code (negative: the number of a signal). Popen.wait would sleep in a
    single system call. Python runs signal handlers only between bytecodes of the main thread, so the handler of a
    signal that comes right before that call, or in another thread, would run only when the process has ended."""
    if process.returncode is not None:
        return process.returncode
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:  # another caller has waited for it
        return process.wait()
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        while not poll.poll(_LOOK_MS):
            pass
    finally:
        os.close(pidfd)
    return process.wait()
