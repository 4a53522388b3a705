"""node.kill: a node dies at once, torchrun and ranks together, as after a power loss."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import Evidence, NodeSite, Record
from torchaos.plugin.families.nodes import NodeDeath, ended, kill


@dataclass(frozen=True)
class Kill(NodeDeath):
    """Sends SIGKILL to every process of the job on the target nodes. The node's kernel runs on, so open connections of
    these processes are reset."""

    name = "node.kill"

    def apply(self, site: NodeSite) -> None:
        kill(site)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return ended(record, fault)
