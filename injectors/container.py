"""The Docker engine changes the container of a node.

- container.kill: it dies at once, as if it was removed by force
- container.stop: it is asked to end, and killed if it does not, as by a scheduler
- container.pause: it is frozen, as for a snapshot, and continues afterwards
- container.disconnect: it is taken off the network, and connected again afterwards
- container.limit: it gets less CPU time or memory than it needs
- container.oom: it runs out of memory, and the kernel ends the largest process there"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import NodeSite, Probe, Seconds
from torchaos.plugin.families.containers import ContainerDeath, ContainerFault, Held, Hit, fill, limit


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


@dataclass(frozen=True)
class Pause(ContainerFault):
    """Freezes the cgroup of the containers. No process in them runs, and no process can notice that it was stopped."""

    name = "container.pause"
    part = "running"
    reports = ("pause",)
    words = "the engine says that the container of node {nodes} was paused"

    def act(self, hit: Hit) -> object:
        return hit.client.pause(hit.id)


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
