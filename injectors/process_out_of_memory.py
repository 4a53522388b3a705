"""process.out_of_memory: the kernel's OOM killer ends the rank, as in a container that has reached its limit."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Emit, Evidence, Fault, Handle, Kind, NodeSite, Probe, Record
from torchaos.plugin.evidence import died
from torchaos.plugin.undo import MemoryCgroup, starve


@dataclass(frozen=True)
class OutOfMemory(Fault):
    """Moves the rank's process into a memory cgroup of torchaos (version 1 or 2) that allows `spare` bytes more than
    the process uses. When the process uses still more, the kernel kills it."""

    spare: int = 1 << 20

    name = "process.out_of_memory"
    where = ("node",)
    needs = frozenset({"pidfd", "root"})
    lethal = True

    def __post_init__(self) -> None:
        if self.spare < 0:
            raise ValueError("spare counts bytes; it is not negative")

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [MemoryCgroup.to_make(pid, site.fault) for pid in site.pids]

    def apply(self, site: NodeSite) -> None:
        site.check(groups := [MemoryCgroup.to_make(pid, site.fault) for pid in site.pids])
        for pid, group in zip(site.pids, groups, strict=True):
            starve(group, pid, self.spare)

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return [_Killed(site.fault, MemoryCgroup.of(pid)) for pid in site.pids]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Proof that the rank was killed for lack of memory: the cgroup's own counter. SIGKILL alone is no proof."""
        death = died(record, fault, -signal.SIGKILL)
        told = next((event for event in record.of_fault(fault, Kind.EFFECT) if event.data.get("killed", 0) > 0), None)
        if death is None or told is None:
            return None
        return Evidence(f"{death.what}; {told.data['effect']}", (*death.events, (told.source, told.seq)))


class _Killed:
    """Reports when the kernel has killed a process in the cgroup."""

    period_s = 0.1

    def __init__(self, fault: str, group: MemoryCgroup) -> None:
        self._fault, self._group, self._told = fault, group, False

    def sample(self, emit: Emit) -> None:
        if not self._told and (killed := self._group.killed()):
            self._told = True
            emit(
                Kind.EFFECT,
                {"fault": self._fault, "effect": f"the kernel's OOM killer ended {killed}", "killed": killed},
            )
