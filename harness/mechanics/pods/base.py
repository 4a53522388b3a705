"""The base classes of the faults of pods, and what the API server says of a pod."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import (
    ChaosError,
    Emit,
    Evidence,
    Hits,
    Irreversible,
    LiveNode,
    NodeSite,
    Probe,
    Where,
)
from torchaos.harness.record.record import Record

_ENDED = "ended"


class PodFault(Fault):
    """A fault of the pods of nodes. `rights`: what the user must be allowed, as (verb, resource)."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"kubectl"})
    hits: ClassVar[Hits] = "nodes"
    rights: ClassVar[Sequence[tuple[str, str]]]


class PodDeath(PodFault, ABC):
    """A fault that ends pods. It is felt if the API server says that the container of the job does not run any more."""

    lethal: ClassVar[bool] = True

    @abstractmethod
    def end(self, pod: Any) -> None:
        """Asks the API server to end the pod. Raises OSError if it refuses."""

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("a pod that has ended does not come back; a controller of the cluster may make another")

    def apply(self, site: NodeSite) -> None:
        try:
            for live in site.nodes:
                self.end(live.node)
        except OSError as error:
            raise ChaosError(str(error)) from error

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return (_Ends(site.fault, site.nodes),)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        seen = [event for event in record.of_fault(fault, Kind.CONTAINER) if event.data["action"] == _ENDED]
        nodes = {event.data["node"] for event in seen}
        wanted = {event.data.get("node") for event in record.of_fault(fault, Kind.APPLYING)}
        if not wanted or not wanted <= nodes:
            return None
        names = ", ".join(map(str, sorted(nodes)))
        return Evidence.of(f"the API server says that the container of node {names} does not run any more", *seen)


@dataclass
class _Ends:
    """A probe that reports, once for each node, that the container of its pod has ended."""

    fault: str
    nodes: Sequence[LiveNode]
    period_s: float = 0.5
    _ended: set[int] = field(default_factory=set)

    def sample(self, emit: Emit) -> None:
        for live in self.nodes:
            node: Any = live.node
            if node.index not in self._ended and node.gone():
                self._ended.add(node.index)
                emit(Kind.CONTAINER, {"fault": self.fault, "node": node.index, "action": _ENDED})
                effect = f"the container of node {node.index} does not run any more"
                emit(Kind.EFFECT, {"fault": self.fault, "effect": effect})
