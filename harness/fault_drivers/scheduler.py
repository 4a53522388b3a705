"""The base classes of faults that a scheduler carries out. Slurm's programs or kubectl give the orders, with the rights
of the user."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchaos.harness.base_classes import Fault
from torchaos.harness.interfaces import (
    ChaosError,
    Emit,
    Evidence,
    Handle,
    Hits,
    Irreversible,
    LiveNode,
    NodeSite,
    Probe,
    Where,
)
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record


class SchedulerFault(Fault, ABC):
    """A fault of the job's nodes that their scheduler carries out, by default Slurm. It is felt if the scheduler
    reports its effect for each target node. `who`: the scheduler in words. `whole_job`: the fault hits all nodes of the
    job. `batch`: the fault is possible only for a batch job of Slurm."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"slurm"})
    hits: ClassVar[Hits] = "nodes"
    who: ClassVar[str] = "Slurm"
    whole_job: ClassVar[bool] = False
    batch: ClassVar[bool] = False

    @abstractmethod
    def order(self, live: LiveNode) -> None:
        """Gives the order to the scheduler. Called for each target node, or once if the fault hits the whole job.
        Raises OSError if the scheduler refuses."""

    def said(self, node: Any) -> str:
        """What the scheduler says about a node, if the fault has taken effect there. Otherwise empty. Raises
        OSError."""
        return f"node {node.index} is not the job's any more" if node.over() else ""

    def changes(self, site: NodeSite) -> Sequence[Handle] | Irreversible:
        return Irreversible("the job was ended; only Slurm can start it again")

    def apply(self, site: NodeSite) -> None:
        try:
            for live in site.nodes[: 1 if self.whole_job else None]:
                self.order(live)
        except OSError as error:
            raise ChaosError(str(error)) from error

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return (_Answers(site.fault, site.nodes, self.who, self.said),)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        seen = [event for event in record.of_fault(fault, Kind.EFFECT) if "node" in event.data]
        wanted = {event.data.get("node") for event in record.of_fault(fault, Kind.APPLYING)}
        if not wanted or not wanted <= {event.data["node"] for event in seen}:
            return None
        return Evidence.of("; ".join(event.data["effect"] for event in seen), *seen)


@dataclass
class _Answers:
    """A probe that reports, once for each node, the scheduler's words about the effect of the fault. `said`: returns
    these words, or an empty text."""

    fault: str
    nodes: Sequence[LiveNode]
    who: str
    said: Callable[[Any], str]
    period_s: float = 0.5
    _seen: set[int] = field(default_factory=set)

    def sample(self, emit: Emit) -> None:
        for live in self.nodes:
            if live.node.index in self._seen:
                continue
            with suppress(OSError):  # the scheduler may not answer for a while
                if found := self.said(live.node):
                    self._seen.add(live.node.index)
                    effect = f"{self.who} says: {found}"
                    emit(Kind.EFFECT, {"fault": self.fault, "effect": effect, "node": live.node.index})


class PodDeath(SchedulerFault):
    """A fault that ends the pods of nodes. It is felt if the API server says that the container of the job does not run
    any more. `rights`: the rights that the user needs, as (verb, resource)."""

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
