"""Slurm takes the job or its nodes away.

- scheduler.cancel_step: the job's step is cancelled; its allocation stays
- scheduler.requeue: the batch job ends and is started again, as after a maintenance of its nodes
- scheduler.preempt: another job, of a partition with a higher priority, takes the place of the job
- scheduler.drain: a node gets no more work; what runs there goes on
- scheduler.node_down: a node is taken out of service at once, which ends what runs there"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchaos.plugin import Handle, NodeSite, Seconds
from torchaos.plugin.families.clusters import SchedulerFault
from torchaos.plugin.undo import SlurmNodeState, SlurmWork


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
