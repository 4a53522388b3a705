"""node.freeze: a whole node stops and continues later as if nothing had happened, as under live migration."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Handle, NodeSite, Record
from torchaos.plugin.families.nodes import processes_of, resumed, send, stopped, tell


@dataclass(frozen=True)
class Freeze(Fault):
    """Sends SIGSTOP to every process of the job on the target nodes, also to torchrun, so no keep-alives are sent.
    SIGCONT follows when the fault is undone."""

    name = "node.freeze"
    where = ("node",)
    needs = frozenset({"pidfd", "proc"})
    late = True  # new processes may start on the node during the fault
    hits = "nodes"

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return resumed(site)

    def apply(self, site: NodeSite) -> None:
        targets = processes_of(site.nodes)
        send(targets, signal.SIGSTOP)
        tell(site, targets, "stopped")

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return stopped(record, fault)
