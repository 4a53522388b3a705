"""Waits for a child process in the main thread without blocking signal handlers."""

from __future__ import annotations

import os
import select
import subprocess
from typing import Any

_LOOK_MS = 500  # milliseconds


def wait_for(process: subprocess.Popen[Any]) -> int:
    """Wait for the process and return its exit code (negative: the signal's number). Popen.wait would sleep in a single
    system call, but Python runs signal handlers only between bytecodes of the main thread. A signal that comes right
    before that call, or that the kernel delivers to another thread, would wait for the end."""
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
