"""node.kill: a node dies at once, torchrun and ranks together, as when it loses its power."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Hits, Irreversible, Site, Where
    from torchaos.harness.record import Record


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL to every process of the job on the target nodes. Their peers get a reset: the kernel lives on."""

    name: ClassVar[str] = "node.kill"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd", "proc"})
    lethal: ClassVar[bool] = True
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: Site) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a dead node can't be brought back; that is the scheduler's affair")

    def apply(self, site: Site) -> None:
        from torchaos.harness.network.nodes import kill

        kill(site)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.network.nodes import ended

        return ended(record, fault)
