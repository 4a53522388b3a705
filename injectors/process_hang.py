"""A rank stops without an error.

- process.freeze: the classic silent hang; `for` is the duration
- process.hold_gil: no Python thread runs for a time, as if a C extension never releases the interpreter lock
- process.uninterruptible: the rank hangs in the kernel, and SIGKILL does not end it, as with a dead disk"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Handle, Irreversible, NodeSite, RankSite, Record, Seconds
from torchaos.plugin.evidence import all_waited, stood_still, stopped
from torchaos.plugin.undo import Process, freeze, freezer_for


@dataclass(frozen=True)
class Freeze(Fault):
    """Sends SIGSTOP to the rank, and SIGCONT when the fault is undone."""

    name = "process.freeze"
    where = ("node",)
    needs = frozenset({"pidfd"})

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [Process.of(pid, "resume") for pid in site.pids]

    def apply(self, site: NodeSite) -> None:
        site.signal(signal.SIGSTOP)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGSTOP), *([(duration_s, signal.SIGCONT)] if duration_s is not None else [])]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return stopped(record, fault)


@dataclass(frozen=True)
class HoldGil(Fault):
    """Sleeps in C for `time` seconds while it holds the interpreter lock, so heartbeat and watchdog threads in Python
    stop too."""

    time: Seconds = 5.0

    name = "process.hold_gil"
    where = ("rank",)
    needs = frozenset({"agent"})

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible(f"the lock is released without an undo after {self.time} s")

    def apply(self, site: RankSite) -> None:
        ctypes.PyDLL(None).usleep(int(self.time * 1e6))  # PyDLL, unlike CDLL, keeps the lock

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return stood_still(record, fault, self.time)


@dataclass(frozen=True)
class Uninterruptible(Fault):
    """Puts the process into state D with the cgroup freezer of version 1 (a process that version 2 has frozen can be
    killed). Signals take effect when the fault is undone, so a supervisor that kills the rank waits until then."""

    name = "process.uninterruptible"
    where = ("node",)
    needs = frozenset({"pidfd", "root", "freezer"})

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [freezer_for(pid, site.fault) for pid in site.pids]

    def apply(self, site: NodeSite) -> None:
        site.check(groups := [freezer_for(pid, site.fault) for pid in site.pids])
        for pid, group in zip(site.pids, groups, strict=True):
            freeze(group, pid)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return all_waited(record, fault)
