"""A process that does not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Called by a child: the kernel sends it this signal when its parent (a pid) dies. If the parent is dead already,
    the child exits with code 1 at once."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
