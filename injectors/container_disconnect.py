"""container.disconnect: the engine takes a node off the network, and puts it back afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import ContainerFault, Hit


@dataclass(frozen=True)
class Disconnect(ContainerFault):
    """The containers lose their interface. They get it back with the same address, under another name (eth1), so that a
    GLOO_SOCKET_IFNAME=eth0 of the job's own no longer fits."""

    name = "container.disconnect"
    part = "network"
    reports = ("disconnect",)
    words = "the engine says that node {nodes} was taken off the network"

    def act(self, hit: Hit) -> object:
        return hit.client.disconnect_container_from_network(hit.id, hit.network[0])
