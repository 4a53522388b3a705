"""node.kill: a node dies at once, torchrun and ranks together, as when it loses its power."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.mechanics.network.nodes import NodeDeath

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, NodeSite
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Kill(NodeDeath):
    """SIGKILL to every process of the job on the target nodes. Their peers get a reset: the kernel lives on."""

    name: ClassVar[str] = "node.kill"

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.network.nodes import kill

        kill(site)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.network.nodes import ended

        return ended(record, fault)
