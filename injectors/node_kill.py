"""node.kill: a node dies at once, torchrun and ranks together, as when it loses its power."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.harness.mechanics.network.nodes import ended, kill
from torchaos.plugin import Evidence, NodeDeath, NodeSite, Record


@dataclass(frozen=True)
class Kill(NodeDeath):
    """SIGKILL to every process of the job on the target nodes. Their peers get a reset: the kernel lives on."""

    name = "node.kill"

    def apply(self, site: NodeSite) -> None:
        kill(site)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return ended(record, fault)
