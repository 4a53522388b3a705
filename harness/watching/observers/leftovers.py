"""Records what a job leaves behind when its command has ended: processes, their listening ports, shared memory, GPU
memory.

This happens before any clean-up. Processes that are still ending, and shared memory that is still being removed, get
GRACE_S seconds. Nothing that another job made at the same time is attributed to this job: an entry in /dev/shm is the
job's if a process of the job was seen to map or open it, or if its name contains the pid of such a process. An entry
that a process of another job still uses is not the job's.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from torchaos.harness.contracts import Emit, Need
from torchaos.harness.machine.gpus import held_by
from torchaos.harness.record.plan import Plan
from torchaos.harness.watching.probes.sampling import Sampling

GRACE_S = 3.0
SHARED = Path("/dev/shm")
_LOOK_S = 0.1
_PERIOD_S = 0.5  # seconds between looks at the entries of SHARED that the job's processes use

Members = Callable[[], Mapping[int, int]]


class Leftovers:
    """Records the leftovers of one run, if an assertion needs them. `members`: returns the job's live processes, start
    time by pid."""

    def __init__(self, plan: Plan, members: Members) -> None:
        self._wanted = Need.LEFTOVERS in plan.collect and not plan.job.attached
        self._members = members
        self._before = dict(_entries()) if self._wanted else {}
        self._users = _Users(members)
        self._sampling = Sampling([self._users] if self._wanted else [], _nothing)

    def start(self) -> None:
        self._sampling.start()

    def take(self, ended: bool, given_up: Callable[[], bool]) -> dict[str, Any] | None:
        """The leftovers as JSON. None if no assertion needs them, or if the job has not `ended` by itself, because then
        it may still use everything. `given_up`: whether to stop waiting for processes that are ending."""
        self._sampling.stop()
        if not (self._wanted and ended):
            return None
        begun = time.monotonic()
        shared = [SHARED / str(entry["name"]) for entry in self._shared_memory()]
        while (left := self._members()) or any(path.exists() for path in shared):
            if time.monotonic() > begun + GRACE_S or given_up():
                break
            time.sleep(_LOOK_S)
        return {
            "waited_s": round(time.monotonic() - begun, 3),
            "processes": [found for pid in sorted(left) if (found := _process(pid))],
            "shared_memory": list(self._shared_memory()),
            "gpu_memory": held_by(left),
        }

    def _shared_memory(self) -> Iterator[dict[str, Any]]:
        new = [name for name, identity in _entries() if self._before.get(name) != identity]
        own = self._users.pids | set(self._members())
        others = {path for pid in psutil.pids() if new and pid not in own for path in _in_use(pid)}
        for name in new:
            path = SHARED / name
            if str(path) in others:
                continue
            numbers = {int(number) for number in re.findall(r"\d+", name)}
            ours = str(path) in self._users.used or bool(numbers & self._users.pids)
            with suppress(OSError):
                yield {"name": name, "bytes": path.stat().st_size, "of_job": ours}


class _Users:
    """A probe that collects the pids of the job's processes, and the entries of SHARED that they use."""

    period_s = _PERIOD_S

    def __init__(self, members: Members) -> None:
        self._members = members
        self.used: set[str] = set()
        self.pids: set[int] = set()
        self._lock = threading.Lock()

    def sample(self, emit: Emit) -> None:
        with self._lock:
            for pid in self._members():
                self.pids.add(pid)
                self.used |= set(_in_use(pid))


def _in_use(pid: int) -> Iterator[str]:
    with suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            if f"{SHARED}/" in line:
                yield line[line.index(f"{SHARED}/") :].rstrip("\n").removesuffix(" (deleted)")
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if target.startswith(f"{SHARED}/"):
                    yield target.removesuffix(" (deleted)")


def _entries() -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields each file of this user in SHARED: its name, and its inode and change time, which distinguish it from a
    later file of the same name. Folders are left out, because they are no shared memory."""
    with suppress(OSError):
        for entry in os.scandir(SHARED):
            with suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if found.st_uid == os.geteuid() and not entry.is_dir(follow_symlinks=False):
                    yield entry.name, (found.st_ino, found.st_ctime_ns)


def _process(pid: int) -> dict[str, Any] | None:
    """A process with its command, listening ports and rank; None if it has ended meanwhile."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            command = " ".join(process.cmdline())[:200]
            sockets = process.net_connections("inet")
            ports = sorted({socket.laddr.port for socket in sockets if socket.status == "LISTEN"})
            rank = process.environ().get("RANK")
        return {"pid": pid, "command": command, "ports": ports, "rank": rank}
    except (psutil.Error, OSError):
        return {"pid": pid, "command": "", "ports": [], "rank": None} if psutil.pid_exists(pid) else None


def _nothing(*_args: Any) -> Any:
    """Ignores an event. It takes the place of `emit`, because the observations of this probe go into an artifact."""
