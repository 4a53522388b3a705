"""container.stop: a node's container is asked to end, and killed if it does not, as by a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import Seconds
from torchaos.plugin.families.containers import ContainerDeath, Hit


@dataclass(frozen=True)
class Stop(ContainerDeath):
    """The engine sends SIGTERM to the first process of the containers, and SIGKILL to all processes after `grace`
    seconds."""

    grace: Seconds = 10.0

    name = "container.stop"
    done = "stopped"
    reports = ("kill", "die")
    words = "the engine says that the container of node {nodes} has ended"

    def act(self, hit: Hit) -> object:
        return hit.client.stop(hit.id, timeout=round(self.grace))
