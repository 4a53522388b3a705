"""node.preempt: a spot machine gets its notice, and is taken away after the notice period."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from torchaos.plugin import Evidence, Kind, NodeSite, Record, Seconds
from torchaos.plugin.families.nodes import NodeDeath, heads, kill, left, processes_of, send, tell


@dataclass(frozen=True)
class Preempt(NodeDeath):
    """Sends SIGTERM to torchrun on the target nodes, and SIGKILL to all processes that are left there after `notice`
    seconds."""

    notice: Seconds = 30.0

    name = "node.preempt"

    def apply(self, site: NodeSite) -> None:
        targets = processes_of(site.nodes)
        send(heads(targets), signal.SIGTERM)
        tell(site, targets, "got SIGTERM")
        site.release()  # the job decides how it uses this time
        end = time.monotonic() + self.notice
        while (left := any(live.processes() for live in site.nodes)) and time.monotonic() < end:
            time.sleep(0.05)
        said = "some processes were left when the time was over" if left else "all were gone in time"
        site.emit(Kind.EFFECT, {"fault": site.fault, "effect": said})
        if left:
            kill(site)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return left(record, fault)
