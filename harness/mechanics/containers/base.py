"""The base classes of the `container.*` injectors. The engine changes the node's container, and its reports are the
proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from torchaos.harness.agent.fault import Fault
from torchaos.harness.contracts import Evidence, Handle, Hits, Irreversible, NodeSite, Where
from torchaos.harness.mechanics.containers import faults
from torchaos.harness.record.record import Record


class _OnContainers(Fault):
    """A fault of containers. `words`: the text of the proof, with {nodes} for the nodes."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"docker"})
    hits: ClassVar[Hits] = "nodes"
    reports: ClassVar[tuple[str, ...]]  # the engine's reports, in order; held ranks continue at the first
    proof: ClassVar[str] = ""  # the report that proves that the fault was felt; empty: the last report
    words: ClassVar[str]

    def act(self, hit: faults.Hit) -> object:
        raise NotImplementedError

    def apply(self, site: NodeSite) -> None:
        faults.do(site, self.act, self.reports[0], self.reports[-1])

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return faults.reported(record, fault, self.proof or self.reports[-1], self.words)


class ContainerFault(_OnContainers):
    """A fault of a container that can be undone."""

    part: ClassVar[Literal["running", "network", "limits"]]  # the part of the container that is restored

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return faults.changes(site, self.part)


class ContainerDeath(_OnContainers):
    """A fault that ends the container."""

    lethal: ClassVar[bool] = True
    done: ClassVar[str]  # "killed" or "stopped"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible(f"a container that was {self.done} stays {self.done}; the scheduler may start another")
