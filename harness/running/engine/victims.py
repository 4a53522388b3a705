"""The processes of a fault's target, at the time when the fault lands."""

from __future__ import annotations

from collections.abc import Sequence

from torchaos.harness.contracts import ChaosError, Hits
from torchaos.harness.mechanics.site import Victim
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.running.launchers.job_view import JobView


def ranks_now(fault: PlannedFault, job: JobView) -> Sequence[int]:
    """The ranks to hit. If the target is a node, the ranks that it has now. After a restart, or with a standby node,
    they may differ from the plan. A fault in the rank always hits the planned ranks, in which it was armed."""
    target = fault.target
    if not target.nodes or fault.where == "rank":
        return target.ranks
    return sorted(rank for rank, process in job.ranks().items() if process.node in target.nodes)


def victims_of(fault: PlannedFault, hits: Hits, job: JobView) -> list[Victim]:
    """The processes to hit. Empty if the fault hits nodes, files or endpoints. Raises ChaosError if a target has no
    process now."""
    if hits in ("nodes", "files", "endpoints"):
        return []
    if hits == "agents" or (hits == "as_targeted" and fault.target.nodes):
        return job.agents(fault.target.nodes)
    ranks, wanted = job.ranks(), ranks_now(fault, job)
    missing = [rank for rank in wanted if rank not in ranks]
    if missing:
        raise ChaosError(f"rank {missing[0]} has no process now")
    found = [ranks[rank] for rank in wanted]
    idle = set(fault.target.nodes) - {process.node for process in found}
    if idle:
        raise ChaosError(f"node {min(idle)} has no rank now")
    return [Victim(process.pid, process.start_ticks, process.rank, process.attempt) for process in found]
