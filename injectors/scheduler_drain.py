"""scheduler.drain: a node gets no more work; what runs there goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchaos.plugin import Handle, NodeSite
from torchaos.plugin.families.clusters import SchedulerFault
from torchaos.plugin.undo import SlurmNodeState


@dataclass(frozen=True)
class Drain(SchedulerFault):
    """Drains the target nodes in Slurm: the job should go on as before. A job that is submitted later must wait, or
    take another node. Undo resumes the node. Needs the right to administer the cluster."""

    name = "scheduler.drain"
    needs = frozenset({"slurm", "slurm_admin"})

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [SlurmNodeState(live.node.host, live.run_id) for live in site.nodes]  # type: ignore[attr-defined]

    def order(self, live: Any) -> None:
        live.node.take_out("drain", SlurmNodeState(live.node.host, live.run_id).reason)

    def said(self, node: Any) -> str:
        state = str(node.state())
        return f"node {node.index} is {state}" if state.startswith("drain") else ""
