"""process.uninterruptible: the rank hangs in the kernel, and SIGKILL does not end it, as with a dead disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Handle, NodeSite, Record
from torchaos.plugin.evidence import all_waited
from torchaos.plugin.undo import freeze, freezer_for


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
