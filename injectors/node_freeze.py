"""node.freeze: a whole node stops and comes back as if nothing had happened, as under live migration."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Freeze(Fault):
    """SIGSTOP to every process of the job on the target nodes, torchrun's keep-alive included; SIGCONT afterwards."""

    name: ClassVar[str] = "node.freeze"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd", "proc"})
    late: ClassVar[bool] = True  # the processes of a node come and go
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        from torchaos.harness.mechanics.network.nodes import resumed

        return resumed(site)

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.network.nodes import processes, send, tell

        targets = processes(site.nodes)
        send(targets, signal.SIGSTOP)
        tell(site, targets, "stopped")

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.network.nodes import stopped

        return stopped(record, fault)
