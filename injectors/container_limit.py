"""container.limit: a node gets less CPU time or memory than it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import NodeSite, Probe
from torchaos.plugin.families.containers import ContainerFault, Held, Hit, limit


@dataclass(frozen=True)
class Limit(ContainerFault):
    """The containers get at most `cpus` CPUs and `memory_mb` million bytes. 0 means no new limit."""

    cpus: float = 0.5
    memory_mb: float = 0.0

    name = "container.limit"
    part = "limits"
    reports = ("update",)
    proof = "limited"
    words = "the kernel kept the container of node {nodes} at its limit"

    def act(self, hit: Hit) -> None:
        limit(hit, self.cpus, round(self.memory_mb * 1e6))

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return [Held(site.fault, site.nodes)]
