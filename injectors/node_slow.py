"""node.slow: a whole node takes its time, as when it throttles or shares its cores: a straggler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Slow(Fault):
    """Every process of the job that is on the target nodes now runs only `share` of the time."""

    share: float = 0.5

    name: ClassVar[str] = "node.slow"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd", "proc"})
    late: ClassVar[bool] = True  # the processes of a node come and go
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        from torchaos.harness.mechanics.network.nodes import resumed, slow_helper

        return [*resumed(site), slow_helper(site).handle]

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.network.nodes import slow_down

        slow_down(site, self.share)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.network.nodes import stopped

        return stopped(record, fault)
