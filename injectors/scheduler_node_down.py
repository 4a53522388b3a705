"""scheduler.node_down: Slurm takes a node out of service at once, and ends what runs there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchaos.plugin import Handle, NodeSite
from torchaos.plugin.families.clusters import SchedulerFault
from torchaos.plugin.undo import SlurmNodeState


@dataclass(frozen=True)
class NodeDown(SchedulerFault):
    """Sets the target nodes down in Slurm, which ends what runs there. Undo resumes the node. Needs the right to
    administer the cluster."""

    name = "scheduler.node_down"
    needs = frozenset({"slurm", "slurm_admin"})
    lethal = True

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [SlurmNodeState(live.node.host, live.run_id) for live in site.nodes]  # type: ignore[attr-defined]

    def order(self, live: Any) -> None:
        live.node.take_out("down", SlurmNodeState(live.node.host, live.run_id).reason)
