"""container.oom: a node runs out of memory, and the kernel ends the largest process there."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin.families.containers import ContainerFault, Hit, fill


@dataclass(frozen=True)
class OutOfMemory(ContainerFault):
    """Limits the memory of the containers to `spare_mb` million bytes more than they use. Then a process in them (with
    the programs `sh`, `head` and `tail`) uses up these bytes, and the kernel ends the largest process, usually a
    rank."""

    spare_mb: float = 64.0

    name = "container.oom"
    part = "limits"
    reports = ("oom",)
    words = "the engine says that the container of node {nodes} ran out of memory"

    def act(self, hit: Hit) -> None:
        fill(hit, round(self.spare_mb * 1e6))
