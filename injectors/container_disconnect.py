"""container.disconnect: the engine takes a node off the network, and connects it again afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin.families.containers import ContainerFault, Hit


@dataclass(frozen=True)
class Disconnect(ContainerFault):
    """The containers lose their network interface. Afterwards they get it back with the same address but another name
    (eth1), so a job that sets GLOO_SOCKET_IFNAME=eth0 can't use it."""

    name = "container.disconnect"
    part = "network"
    reports = ("disconnect",)
    words = "the engine says that node {nodes} was taken off the network"

    def act(self, hit: Hit) -> object:
        return hit.client.disconnect_container_from_network(hit.id, hit.network[0])
