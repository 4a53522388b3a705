"""scheduler.requeue: Slurm ends the batch job, and starts it again, as after a maintenance of its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchaos.plugin.families.clusters import SchedulerFault


@dataclass(frozen=True)
class Requeue(SchedulerFault):
    """Slurm ends the training job and puts it back into the queue. It must run as a batch job, and job.resubmit must
    allow another submission. The user's own rights are enough."""

    name = "scheduler.requeue"
    lethal = True
    whole_job = True
    batch = True

    def order(self, live: Any) -> None:
        live.node.requeue()
