"""node.slow: a whole node is slow, as if it throttles or shares its cores: a straggler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Handle, NodeSite, Record
from torchaos.plugin.families.nodes import resumed, slow_down, slow_helper, stopped


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
