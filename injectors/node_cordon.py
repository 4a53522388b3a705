"""node.cordon: the machine of a pod takes no new pods; what runs there goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchaos.plugin import Handle, NodeSite
from torchaos.plugin.families.clusters import SchedulerFault
from torchaos.plugin.undo import KubernetesNode


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
