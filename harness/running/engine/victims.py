"""The processes of a fault's target, as they are when it lands."""

from __future__ import annotations

from collections.abc import Sequence

from torchaos.harness.contracts import ChaosError, Hits
from torchaos.harness.mechanics.site import Victim
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.running.launchers.attach import Attached
from torchaos.harness.running.launchers.job import Job


def ranks_now(fault: PlannedFault, job: Job | Attached) -> Sequence[int]:
    """Of a node those that are there: after a restart, or with a standby, others than were planned. A fault in the rank
    was armed in those that were planned."""
    target = fault.target
    if not target.nodes or fault.where == "rank":
        return target.ranks
    return sorted(rank for rank, one in job.ranks().items() if one.node in target.nodes)


def victims_of(fault: PlannedFault, hits: Hits, job: Job | Attached) -> list[Victim]:
    """Raises ChaosError when one of them is not there."""
    if hits in ("nodes", "files", "endpoints"):
        return []
    if hits == "agents" or (hits == "as_targeted" and fault.target.nodes):
        return job.agents(fault.target.nodes)
    ranks, wanted = job.ranks(), ranks_now(fault, job)
    missing = [rank for rank in wanted if rank not in ranks]
    if missing:
        raise ChaosError(f"rank {missing[0]} has no process now")
    found = [ranks[rank] for rank in wanted]
    idle = set(fault.target.nodes) - {one.node for one in found}
    if idle:
        raise ChaosError(f"node {min(idle)} has no rank now")
    return [Victim(one.pid, one.start_ticks, one.rank, one.attempt) for one in found]
