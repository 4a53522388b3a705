"""container.stop: a node's container is told to end, and killed when it does not, as a scheduler ends one."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import ContainerDeath, Hit, Seconds


@dataclass(frozen=True)
class Stop(ContainerDeath):
    """SIGTERM by the engine to the first process of the containers, and SIGKILL to all of it after `grace`."""

    grace: Seconds = 10.0

    name = "container.stop"
    done = "stopped"
    reports = ("kill", "die")
    words = "the engine says that the container of node {nodes} has ended"

    def act(self, hit: Hit) -> object:
        return hit.client.stop(hit.id, timeout=round(self.grace))
