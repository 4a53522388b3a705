"""container.pause: a node's container is frozen by the engine, as under a snapshot, and goes on afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import ContainerFault, Hit


@dataclass(frozen=True)
class Pause(ContainerFault):
    """The cgroup of the containers is frozen: no process of them runs, and none can notice that it was stopped."""

    name = "container.pause"
    part = "running"
    reports = ("pause",)
    words = "the engine says that the container of node {nodes} was paused"

    def act(self, hit: Hit) -> object:
        return hit.client.pause(hit.id)
