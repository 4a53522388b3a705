"""Whom a fault really hit, as the processes were seen that were there when it landed. Pure.

Numbers of ranks are given out anew in every attempt, and GPUs are counted on each node: a GPU is (node, NVML's index).
"""

from __future__ import annotations

from collections.abc import Iterator

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.judging.landings import Landing
from torchaos.harness.record import Record

Gpu = tuple[int, int]


def gpus_of(run: Record, hit: Landing) -> frozenset[Gpu]:
    """Those that the ranks used that it hit; of these ranks' nodes the one that the scenario names, where it does."""
    named = next((one.params.get("gpu") for one in run.plan.faults if one.id == hit.fault), None)
    ups = [event for event in run.of_kind(Kind.RANK_UP) if event.data["pid"] in hit.pids]
    return frozenset((up.data["node"], _gpu_of(up) if named is None else int(named)) for up in ups)


def ranks_on(run: Record, gpus: frozenset[Gpu]) -> Iterator[Event]:
    """The ranks that came up on one of these, in order of time."""
    return (up for up in run.of_kind(Kind.RANK_UP) if (up.data["node"], _gpu_of(up)) in gpus)


def _gpu_of(up: Event) -> int:
    return int(up.data.get("gpu", up.data["local_rank"]))
