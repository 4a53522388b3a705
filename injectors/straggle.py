"""A slow rank.

- straggle.sleep: by any factor and without privileges; after each step it sleeps, in proportion to the step's time
- straggle.stop: by SIGSTOP and SIGCONT in turns, for any rank and without privileges
- straggle.quota: the kernel gives its process a share of the CPU (cgroup quota, version 1 or 2)"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Emit, Evidence, Fault, Handle, Kind, NodeSite, Probe, RankSite, Record, Seconds, TargetGone
from torchaos.plugin.evidence import slower, took_turns
from torchaos.plugin.undo import CpuCgroup, Process, throttle


@dataclass(frozen=True)
class StraggleSleep(Fault):
    """A step of the rank takes `factor` times as long. `for` is the duration."""

    factor: float = 3.0

    name = "straggle.sleep"
    where = ("rank",)
    needs = frozenset({"agent"})
    lasting = True

    def __post_init__(self) -> None:
        if self.factor <= 1:
            raise ValueError("factor says how many times as long a step takes; it is more than 1")

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return ()  # The fault lasts until its control page is cleared, whose undo is on disk for every fault.

    def apply(self, site: RankSite) -> None:
        since = time.monotonic()

        def sleep() -> None:
            nonlocal since
            site.lease.sleep((self.factor - 1) * (time.monotonic() - since))
            since = time.monotonic()

        site.after_steps(sleep)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return slower(record, fault, factor=self.factor)


@dataclass(frozen=True)
class StraggleStop(Fault):
    """The rank runs for 1/`factor` of each `period` (seconds). Measured: with a factor of 3 it is about 2.5 times as
    slow."""

    factor: float = 3.0
    period: Seconds = 0.02

    name = "straggle.stop"
    where = ("node",)
    needs = frozenset({"pidfd"})

    def __post_init__(self) -> None:
        if self.factor <= 1 or self.period <= 0:
            raise ValueError("factor is more than 1, and period more than 0")

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [Process.of(pid, "resume") for pid in site.pids]

    def apply(self, site: NodeSite) -> None:
        """Does nothing. The probe sends the signals; it stops before the fault is undone, or when the harness ends."""

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return (_Turns(site, self.period / self.factor, self.period * (1 - 1 / self.factor)),)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return took_turns(record, fault)


class _Turns:
    def __init__(self, site: NodeSite, on_s: float, off_s: float) -> None:
        self._site, self.period_s, self._off_s = site, on_s, off_s

    def sample(self, emit: Emit) -> None:
        try:
            self._site.signal(signal.SIGSTOP)
            time.sleep(self._off_s)
        except TargetGone:
            return
        finally:
            try:
                self._site.signal(signal.SIGCONT)
            except TargetGone:
                pass


@dataclass(frozen=True)
class StraggleQuota(Fault):
    """Moves the rank's process, without its children, into a cgroup of torchaos with `cpus` CPUs, and moves it back
    afterwards."""

    cpus: float = 0.3

    name = "straggle.quota"
    where = ("node",)
    needs = frozenset({"pidfd", "root"})

    def __post_init__(self) -> None:
        if not 0.1 <= self.cpus <= 64:
            raise ValueError("cpus is between 0.1 and 64")

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [CpuCgroup.to_make(pid, site.fault) for pid in site.pids]

    def apply(self, site: NodeSite) -> None:
        site.check(groups := [CpuCgroup.to_make(pid, site.fault) for pid in site.pids])
        for pid, group in zip(site.pids, groups, strict=True):
            throttle(group, pid, self.cpus)

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return [_Throttled(site.fault, CpuCgroup.of(pid)) for pid in site.pids]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        told = [event for event in record.of_fault(fault, Kind.EFFECT) if event.data.get("throttled", 0) > 0]
        if not told or not any(record.of_fault(fault, Kind.APPLYING)):
            return None
        return Evidence.of(f"the kernel reports: {told[-1].data['effect']}", told[-1])


class _Throttled:
    """The number of times that the kernel throttled the group, from its cpu.stat."""

    period_s = 0.5

    def __init__(self, fault: str, group: CpuCgroup) -> None:
        self._fault, self._group, self._told = fault, group, 0

    def sample(self, emit: Emit) -> None:
        number, seconds = self._group.throttled()
        if number > self._told:
            self._told, effect = number, f"throttled {number} time{'s' if number > 1 else ''}, {seconds:.2f} s in all"
            emit(Kind.EFFECT, {"fault": self._fault, "effect": effect, "throttled": number})
