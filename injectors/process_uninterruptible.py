"""process.uninterruptible: the rank sleeps in the kernel and SIGKILL does not end it, as on a dead disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Uninterruptible(Fault):
    """State D, by the cgroup freezer of version 1 (that of version 2 leaves a process killable). Signals act once it is
    taken back: a supervisor that kills the rank meanwhile waits that long."""

    name: ClassVar[str] = "process.uninterruptible"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd", "root", "freezer"})

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        from torchaos.harness.undo.cgroup import freezer_for

        return [freezer_for(pid, site.fault) for pid in site.pids]

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.undo.cgroup import freeze, freezer_for

        site.check(groups := [freezer_for(pid, site.fault) for pid in site.pids])
        for pid, group in zip(site.pids, groups, strict=True):
            freeze(group, pid)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.waits import all_waited

        return all_waited(record, fault)
