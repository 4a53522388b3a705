"""container.limit: a node gets less than it needs: of the CPU, or of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, NodeSite, Probe, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Limit(Fault):
    """The containers get `cpus` CPUs and `memory_mb` million bytes at most; 0: as much as before."""

    cpus: float = 0.5
    memory_mb: float = 0.0

    name: ClassVar[str] = "container.limit"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"docker"})
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        from torchaos.harness.mechanics.containers.faults import changes

        return changes(site, "limits")

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.containers.faults import do, limit

        do(site, lambda hit: limit(hit, self.cpus, round(self.memory_mb * 1e6)), "update")

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        from torchaos.harness.mechanics.containers.faults import Held

        return [Held(site.fault, site.nodes)]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.containers.faults import told

        return told(record, fault, "limited", "the kernel held the container of node {nodes} back at its limit")
