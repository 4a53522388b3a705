"""scheduler.preempt: another job, of a partition with a higher priority, takes the place of the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchaos.plugin import Handle, NodeSite, Seconds
from torchaos.plugin.families.clusters import SchedulerFault
from torchaos.plugin.undo import SlurmWork


@dataclass(frozen=True)
class Preempt(SchedulerFault):
    """Submits a job that only sleeps to `partition`, for the whole of the target node, so that Slurm preempts the
    training job. It ends after `time`, or when the fault is undone. The cluster's PreemptMode and GraceTime say what
    happens to the training job. The right to use that partition is enough."""

    partition: str
    time: Seconds = 60.0

    name = "scheduler.preempt"
    lethal = True
    whole_job = True

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [SlurmWork(_name(site.nodes[0].run_id))]

    def order(self, live: Any) -> None:
        live.node.displace(_name(live.run_id), self.partition, self.time)


def _name(run_id: str) -> str:
    return f"{run_id}.other"
