"""What the `container.*` injectors share: the engine does it to the node's container, and its reports are the proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from torchaos.harness.agent.fault import Fault
from torchaos.harness.contracts import Evidence, Handle, Hits, Irreversible, NodeSite, Where
from torchaos.harness.mechanics.containers import faults
from torchaos.harness.record.record import Record


class _OnContainers(Fault):
    """`words` say what the proof shows of the nodes."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"docker"})
    hits: ClassVar[Hits] = "nodes"
    reports: ClassVar[tuple[str, ...]]  # of the engine while it does it, in turn; held ranks go on at the first
    proof: ClassVar[str] = ""  # the report that shows that it was felt; empty: the last
    words: ClassVar[str]

    def act(self, hit: faults.Hit) -> object:
        raise NotImplementedError

    def apply(self, site: NodeSite) -> None:
        faults.do(site, self.act, self.reports[0], self.reports[-1])

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return faults.reported(record, fault, self.proof or self.reports[-1], self.words)


class ContainerFault(_OnContainers):
    """A fault of a container that can be undone."""

    part: ClassVar[Literal["running", "network", "limits"]]  # of the container: what is set right again

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return faults.changes(site, self.part)


class ContainerDeath(_OnContainers):
    """The container ends by it."""

    lethal: ClassVar[bool] = True
    done: ClassVar[str]  # what was done to it: killed, stopped

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible(f"a container that was {self.done} stays so; starting another is the scheduler's affair")
