"""node.reboot: a node dies, stays away, and comes back with torchrun started anew."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.wire import Kind, Seconds

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Hits, Irreversible, Site, Where
    from torchaos.harness.record import Record


@dataclass(frozen=True)
class Reboot(Fault):
    """As node.kill; after `away` the job's command is started again on the target nodes."""

    away: Seconds = 5.0

    name: ClassVar[str] = "node.reboot"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd", "proc"})
    lethal: ClassVar[bool] = True
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: Site) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("what was in memory is lost; the node itself comes back")

    def apply(self, site: Site) -> None:
        from torchaos.harness.network.nodes import kill

        for live in site.nodes:
            live.keep_place()
        try:
            kill(site)
            site.release()
            time.sleep(self.away)
        finally:
            for live in site.nodes:
                pid = live.start_again()
                site.emit(Kind.EFFECT, {"fault": site.fault, "effect": f"node {live.node.index} is back, pid {pid}"})

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.network.nodes import ended

        return ended(record, fault)
