"""Refuses scenarios that use features which are not available on other machines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from torchaos.harness import registry
from torchaos.harness.agent.plan import Moment
from torchaos.harness.contracts import Need, UsageError
from torchaos.harness.record.plan import PlannedFault, PlannedJob
from torchaos.harness.running.launchers.fits import is_controllers

_NOT_SEEN = {
    Need.HANGS: "an assertion asks for the culprits of a hang, which are looked for on one machine only",
    Need.LEFTOVERS: "an assertion asks for what the job left behind, which is looked for on one machine only",
}


def check_far(
    launcher: str, job: PlannedJob, faults: Sequence[PlannedFault], collect: Collection[Need], file: Path
) -> None:  # fmt: skip
    """Raises UsageError if the scenario uses a feature that works only on the machine of `torchaos run`. The
    capabilities that faults need are checked on each node itself."""
    wrong = next((why for need, why in _NOT_SEEN.items() if need in collect), None)
    if job.checkpoints_size:
        wrong = "job.checkpoints.size makes a disk on this machine"
    for fault in faults:
        found = registry.find("injectors", fault.inject)
        if is_controllers(found, launcher) and isinstance(fault.trigger, Moment):
            why = "the cluster does it, and no rank waits for that; write time or after, and no step"
            raise UsageError(f"{file}: fault {fault.id}: {why}")
        nodes = fault.target.nodes or {rank // job.per_node for rank in fault.target.ranks}
        if getattr(found, "whole_job", False) and len(fault.target.nodes) < job.nodes:
            every = ", ".join(map(str, range(job.nodes)))
            raise UsageError(f"{file}: fault {fault.id}: it hits the whole job; write target: {{nodes: [{every}]}}")
        if getattr(found, "batch", False) and job.slurm.get("submit") != "batch":
            raise UsageError(f"{file}: fault {fault.id}: only a batch job has it; write job.slurm: {{submit: batch}}")
        outside = fault.where == "node" and found.hits != "files"
        if outside and isinstance(fault.trigger, Moment) and len(nodes) > 1:
            wrong = f"fault {fault.id} hits several nodes at the moment of one rank; write a fault for each node"
    if wrong:
        raise UsageError(f"{file}: launcher: {launcher}: {wrong}; leave it out, or write launcher: local or netns")
