"""straggle.quota: a slow rank. The kernel gives its process a share of the CPU (cgroup quota, version 1 or 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Emit, Evidence, Fault, Handle, Kind, NodeSite, Probe, Record
from torchaos.plugin.undo import CpuCgroup, throttle


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
