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


def torchrun_here() -> int:
    """The pid of the torchelastic agent of this user that this process can see. Raises UsageError if there is none, if
    there are several, or if its environment can't be read."""
    found = [process for process in psutil.process_iter() if _is_ours(process)]
    if len(found) != 1:
        pids = ", ".join(str(process.pid) for process in found) or "none"
        raise UsageError(f"one process of user {os.getuid()} must be a torchrun here, and these are: {pids}")
    if not environ_of(found[0].pid):
        raise UsageError(f"the torchrun with pid {found[0].pid} can't be observed from here: it has other rights")
    return found[0].pid


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.uids().real == os.getuid() and _is_agent(process)
    except psutil.Error:
        return False


def _is_agent(process: psutil.Process) -> bool:
    """Whether the process has workers now, or is a torchrun between two attempts."""
    if Identity.of(environ_of(process.pid)):
        return False
    if any(Identity.of(environ_of(child.pid)) for child in process.children()):
        return True
    command = process.cmdline()[:4]
    is_python = bool(command) and Path(command[0]).name.startswith(("python", "torchrun"))
    return is_python and any(part.endswith(_AGENTS) for part in command)
