"""A rank, or torchrun, dies.

- process.kill: at once and without warning, as by the OOM killer or on a lost node
- process.kill_agent: the torchelastic agent (torchrun itself) dies; its workers continue without a parent
- process.terminate: a notice, a grace period, then death, as for a spot preemption or a scheduler's cancel
- process.exit: the rank exits in the middle of its work, with a chosen exit code
- process.abort: SIGABRT, as a failed C++ check or NCCL's watchdog sends it
- process.segfault: the rank reads address 0, as a broken extension or driver does"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Kind, NodeSite, RankSite, Record, Seconds, Site
from torchaos.plugin.evidence import gone
from torchaos.plugin.families.ranks import DeathFault


@dataclass(frozen=True)
class Kill(DeathFault):
    """Sends SIGKILL to the rank. No handler runs, and no buffer is flushed."""

    name = "process.kill"
    where = ("rank", "node")
    needs = frozenset({"pidfd"})

    def apply(self, site: Site) -> None:
        site.signal(signal.SIGKILL)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGKILL)]


@dataclass(frozen=True)
class KillAgent(DeathFault):
    """Sends SIGKILL to the torchelastic agents on the target's nodes. The workers stay alive, and no agent is left to
    restart or end them."""

    name = "process.kill_agent"
    where = ("node",)
    needs = frozenset({"pidfd"})
    hits = "agents"
    irreversible = "a dead agent can't be brought back; the scheduler has to start the job again"

    def apply(self, site: NodeSite) -> None:
        site.signal(signal.SIGKILL)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGKILL)]


@dataclass(frozen=True)
class Terminate(DeathFault):
    """Sends SIGTERM, and SIGKILL to the processes that are still alive after `grace` seconds. With `target: {node: N}`
    SIGTERM goes to the torchelastic agent, as a preemption notice goes to a container's first process; otherwise to the
    ranks."""

    grace: Seconds = 30.0

    name = "process.terminate"
    where = ("node",)
    needs = frozenset({"pidfd"})
    hits = "as_targeted"

    def apply(self, site: NodeSite) -> None:
        site.signal(signal.SIGTERM)
        site.release()  # the job decides how it uses the grace period
        left = site.wait_for_exit(self.grace)
        site.emit(
            Kind.EFFECT, {"fault": site.fault, "effect": f"{len(left)} of {len(site.pids)} outlived the grace period"}
        )
        if left:
            site.signal(signal.SIGKILL)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGTERM), (self.grace, signal.SIGKILL)]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return gone(record, fault)


@dataclass(frozen=True)
class Exit(DeathFault):
    """Calls _exit(2) with `code`: no clean-up runs. The most dangerous code is 0, because a supervisor then believes
    that the rank succeeded."""

    code: int = 1

    name = "process.exit"
    where = ("rank",)
    needs = frozenset({"agent"})

    def apply(self, site: RankSite) -> None:
        os._exit(self.code)


@dataclass(frozen=True)
class Abort(DeathFault):
    """Calls abort(3): no Python clean-up runs."""

    name = "process.abort"
    where = ("rank",)
    needs = frozenset({"agent"})
    code = -signal.SIGABRT

    def apply(self, site: RankSite) -> None:
        os.abort()

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGABRT)]


@dataclass(frozen=True)
class Segfault(DeathFault):
    """Reads address 0; the kernel ends the process with SIGSEGV."""

    name = "process.segfault"
    where = ("rank",)
    needs = frozenset({"agent"})
    code = -signal.SIGSEGV

    def apply(self, site: RankSite) -> None:
        ctypes.string_at(0)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGSEGV)]
