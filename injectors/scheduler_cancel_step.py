"""scheduler.cancel_step: the job's step is cancelled; its allocation stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchaos.plugin.families.clusters import SchedulerFault


@dataclass(frozen=True)
class CancelStep(SchedulerFault):
    """Slurm sends `signal` to all processes of the job's step. KILL also ends the agents of torchaos and their reapers.
    The user's own rights are enough."""

    signal: Literal["TERM", "KILL"] = "TERM"

    name = "scheduler.cancel_step"
    lethal = True
    whole_job = True

    def order(self, live: Any) -> None:
        live.node.cancel_step(self.signal)
