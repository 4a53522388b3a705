"""A cluster of Kubernetes takes the pod of a node away, or closes its machine.

- pod.delete: the pod is deleted, as by a user, a controller or the descheduler
- pod.evict: the pod is evicted, as when its machine is drained
- node.cordon: the machine takes no new pods; what runs there goes on"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchaos.plugin import Handle, NodeSite, Seconds
from torchaos.plugin.families.clusters import PodDeath, SchedulerFault
from torchaos.plugin.undo import KubernetesNode


@dataclass(frozen=True)
class Delete(PodDeath):
    """The API server deletes the pods of the target nodes. `grace`: the time between SIGTERM and SIGKILL; by default,
    the time that the pod's own specification gives. With 0, the pod is killed at once."""

    grace: Seconds | None = None

    name = "pod.delete"
    rights = (("delete", "pods"),)

    def end(self, pod: Any) -> None:
        pod.delete(None if self.grace is None else round(self.grace))


@dataclass(frozen=True)
class Evict(PodDeath):
    """The API server evicts the pods of the target nodes. If a disruption budget forbids that, it refuses, and the
    fault does not land."""

    name = "pod.evict"
    rights = (("create", "pods/eviction"),)

    def end(self, pod: Any) -> None:
        pod.evict()


@dataclass(frozen=True)
class Cordon(SchedulerFault):
    """Closes the machine of a pod to new pods: after a later pod.delete or pod.evict, the new pods need another
    machine. Undo opens the machine again. Needs rights for the cluster's nodes, which a Role of a namespace can't
    give."""

    name = "node.cordon"
    needs = frozenset({"kubectl"})
    who = "the API server"
    rights = (("get", "nodes"), ("patch", "nodes"))

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [_machine(live) for live in site.nodes]

    def order(self, live: Any) -> None:
        _machine(live).close()

    def said(self, node: Any) -> str:
        closed = not KubernetesNode(node.machine, "-", node.kubectl.context).is_open()
        return f"machine {node.machine} of node {node.index} takes no pods" if closed else ""


def _machine(live: Any) -> KubernetesNode:
    return KubernetesNode(live.node.machine, live.run_id, live.node.kubectl.context)
