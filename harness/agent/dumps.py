"""Python stacks of a rank on request: at a signal, Python's faulthandler writes the main thread's stack to a file. It
is C code that needs no interpreter lock, so it also works in a rank that hangs in a call, and costs nothing before.

Both sides import this file; standard library only. The harness sends the signal only when it is about to end the job,
and only to a process that handles it. A rank's file is `RUN_DIR/agent/stacks/rank<R>-a<attempt>-p<pid>.txt`."""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from . import wire

if TYPE_CHECKING:
    from .arming import Identity

SIGNAL = signal.SIGRTMAX - 7  # real-time signals have no use of their own
FOLDER = "stacks"


def listen(who: Identity) -> None:
    """Installs the handler, unless the job has one for this signal. Without a place for the file, there is none."""
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    with suppress(OSError, RuntimeError, ValueError):
        folder = Path(os.environ[wire.ENV_PLAN]).parent / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"rank{who.rank}-a{who.attempt}-p{who.pid}.txt"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        faulthandler.register(SIGNAL, os.open(path, flags, 0o600), all_threads=False)
