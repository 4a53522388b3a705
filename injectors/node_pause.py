"""A whole node stops, or is slow.

- node.freeze: it stops and continues later as if nothing had happened, as under live migration
- node.slow: it throttles or shares its cores: a straggler"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Handle, NodeSite, Record
from torchaos.plugin.families.nodes import processes_of, resumed, send, slow_down, slow_helper, stopped, tell


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


@dataclass(frozen=True)
class Slow(Fault):
    """Every process of the job on the target nodes runs only for `share` of the time."""

    share: float = 0.5

    name = "node.slow"
    where = ("node",)
    needs = frozenset({"pidfd", "proc"})
    late = True  # new processes may start on the node during the fault
    hits = "nodes"

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [*resumed(site), slow_helper(site).handle]

    def apply(self, site: NodeSite) -> None:
        slow_down(site, self.share)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return stopped(record, fault)
