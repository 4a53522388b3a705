"""container.oom: a node runs out of memory, and the kernel ends the largest process there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class OutOfMemory(Fault):
    """The memory of the containers is limited to `spare_mb` million bytes more than they use, and a process started
    there (`sh`, `head` and `tail` must be) that uses them up: the kernel ends the largest, as a rule a rank."""

    spare_mb: float = 64.0

    name: ClassVar[str] = "container.oom"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"docker"})
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        from torchaos.harness.mechanics.containers.faults import changes

        return changes(site, "limits")

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.containers.faults import do, fill

        do(site, lambda hit: fill(hit, round(self.spare_mb * 1e6)), "oom")

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.containers.faults import told

        return told(record, fault, "oom", "the engine says that the container of node {nodes} ran out of memory")
