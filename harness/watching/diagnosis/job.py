"""The live job of a torchrun, given by its pid: finds the ranks, and whoever holds them up."""

from __future__ import annotations

import time
from pathlib import Path

from torchaos.harness.contracts import RankProcess, UsageError
from torchaos.harness.watching.diagnosis import live
from torchaos.harness.watching.diagnosis.verdict import Diagnosis
from torchaos.harness.watching.probes.agents import check_agent
from torchaos.harness.watching.probes.census import Census
from torchaos.harness.watching.probes.processes import find_ranks, rank_process


def of_job(pid: int, stamps: Path | None = None) -> Diagnosis:
    """`stamps`: the agent's folder, where the job has the agent. Raises UsageError where `pid` is no torchrun of this
    user, or has no ranks."""
    check_agent(pid)
    ranks = ranks_of(pid)
    if not ranks:
        raise UsageError(f"pid {pid}: no ranks below it; is it still starting, or between two attempts?")
    return live.diagnose(ranks, 0, stamps)


def ranks_of(pid: int) -> dict[int, RankProcess]:
    """On this machine; of several attempts the latest."""
    census = Census(None)
    census.add_root(pid)
    census.scan()
    found = find_ranks(census.members, (), time.monotonic())
    some = sorted(found.ranks.items())
    return {rank: rank_process(one, one.identity) for (_, rank), one in some if one.identity}
