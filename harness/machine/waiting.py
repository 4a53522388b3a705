"""Waiting for a process of one's own in the main thread, without getting deaf to signals."""

from __future__ import annotations

import os
import select
import subprocess
from typing import Any

_LOOK_MS = 500


def wait_for(process: subprocess.Popen[Any]) -> int:
    """Its exit code (negative: the signal's number), as of Popen.wait. That one sleeps in a single system call, and
    Python runs handlers only between bytecodes of the main thread: a signal that comes right before the call, or that
    the kernel gives to another thread, would be acted on only when the process has ended."""
    if process.returncode is not None:
        return process.returncode
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:  # somebody else has waited for it
        return process.wait()
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        while not poll.poll(_LOOK_MS):
            pass
    finally:
        os.close(pidfd)
    return process.wait()
