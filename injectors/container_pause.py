"""container.pause: the engine freezes a node's container, as for a snapshot, and it continues afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin.families.containers import ContainerFault, Hit


@dataclass(frozen=True)
class Pause(ContainerFault):
    """Freezes the cgroup of the containers. No process in them runs, and no process can notice that it was stopped."""

    name = "container.pause"
    part = "running"
    reports = ("pause",)
    words = "the engine says that the container of node {nodes} was paused"

    def act(self, hit: Hit) -> object:
        return hit.client.pause(hit.id)
