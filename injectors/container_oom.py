"""container.oom: a node runs out of memory, and the kernel ends the largest process there."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.harness.mechanics.containers.faults import fill
from torchaos.plugin import ContainerFault, Hit


@dataclass(frozen=True)
class OutOfMemory(ContainerFault):
    """The memory of the containers is limited to `spare_mb` million bytes more than they use, and a process started
    there (`sh`, `head` and `tail` must be) that uses them up: the kernel ends the largest, as a rule a rank."""

    spare_mb: float = 64.0

    name = "container.oom"
    part = "limits"
    reports = ("oom",)
    words = "the engine says that the container of node {nodes} ran out of memory"

    def act(self, hit: Hit) -> None:
        fill(hit, round(self.spare_mb * 1e6))
