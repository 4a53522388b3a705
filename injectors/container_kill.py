"""container.kill: a node's container dies at once, as if it was removed by force."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin.families.containers import ContainerDeath, Hit


@dataclass(frozen=True)
class Kill(ContainerDeath):
    """The engine sends SIGKILL to the containers of the target nodes. Their processes and their network end with
    them."""

    name = "container.kill"
    done = "killed"
    reports = ("die",)
    words = "the engine says that the container of node {nodes} died"

    def act(self, hit: Hit) -> object:
        return hit.client.kill(hit.id)
