"""Diagnoses the live job of a torchrun, given by its pid."""

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
    """Finds the ranks of a torchrun and diagnoses them. `stamps`: the folder of the agent's stamps, if the job has the
    agent. Raises UsageError if `pid` is no torchrun of this user, or has no ranks."""
    check_agent(pid)
    ranks = ranks_of(pid)
    if not ranks:
        raise UsageError(f"pid {pid}: no ranks below it; is it still starting, or between two attempts?")
    return live.diagnose(ranks, 0, stamps)


def ranks_of(pid: int) -> dict[int, RankProcess]:
    """The ranks below this torchrun on this machine, by number. If there are several attempts, those of the latest."""
    census = Census(None)
    census.add_root(pid)
    census.scan()
    found = find_ranks(census.members, (), time.monotonic())
    in_order = sorted(found.ranks.items())
    return {rank: rank_process(member, member.identity) for (_, rank), member in in_order if member.identity}
