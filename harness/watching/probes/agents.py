"""Recognizes a torchelastic agent, the process of torchrun."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from torchaos.harness.contracts import UsageError
from torchaos.harness.machine import proc
from torchaos.harness.watching.probes.census import Identity, environ_of

_AGENTS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "torch/distributed/run.py")


def check_agent(pid: int) -> int:
    """The start time, in clock ticks since boot, of the torchelastic agent `pid`. Raises UsageError if `pid` is no
    torchelastic agent of this user."""
    found = proc.stat(pid)
    if found is None or found.state in "ZX":
        raise UsageError(f"pid {pid}: there is no such process; give the pid of a running torchrun")
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid():
            raise UsageError(f"pid {pid} belongs to {process.username()}; run torchaos as that user")
        if Identity.of(environ_of(pid)):
            raise UsageError(f"pid {pid} is a rank; give the pid of its torchrun, which is {found.parent}")
        if not _is_agent(process):
            below = next((child.pid for child in process.children(recursive=True) if _is_agent(child)), None)
            hint = f"; the torchrun below it is {below}" if below else "; give the pid of a running torchrun"
            raise UsageError(f"pid {pid} ({process.name()}) is no torchelastic agent{hint}")
    except psutil.Error as error:
        raise UsageError(f"pid {pid} can't be looked at: {error}") from error
    return found.ticks


def _is_agent(process: psutil.Process) -> bool:
    """Whether the process has workers now, or is a torchrun between two attempts."""
    if Identity.of(environ_of(process.pid)):
        return False
    if any(Identity.of(environ_of(child.pid)) for child in process.children()):
        return True
    command = process.cmdline()[:4]
    is_python = bool(command) and Path(command[0]).name.startswith(("python", "torchrun"))
    return is_python and any(part.endswith(_AGENTS) for part in command)
