"""The base class of the faults that end pods."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torchaos.harness.contracts import Irreversible, LiveNode, NodeSite
from torchaos.harness.mechanics.scheduler.base import SchedulerFault


class PodDeath(SchedulerFault):
    """A fault that ends the pods of nodes. It is felt if the API server says that the container of the job does not run
    any more. `rights`: what the user must be allowed, as (verb, resource)."""

    needs: ClassVar[frozenset[str]] = frozenset({"kubectl"})
    lethal: ClassVar[bool] = True
    who: ClassVar[str] = "the API server"
    rights: ClassVar[Sequence[tuple[str, str]]]

    @abstractmethod
    def end(self, pod: Any) -> None:
        """Asks the API server to end the pod. Raises OSError if it refuses."""

    def order(self, live: LiveNode) -> None:
        self.end(live.node)

    def said(self, node: Any) -> str:
        return f"the container of node {node.index} does not run any more" if node.gone() else ""

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("a pod that has ended does not come back; a controller of the cluster may make another")
