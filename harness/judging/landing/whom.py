"""Whom a fault really hit, as the processes were seen that were there when it landed. Pure.

Numbers of ranks are given out anew in every attempt, and GPUs are counted on each node: a GPU is (node, NVML's index).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.contracts import Target
from torchaos.harness.judging.landing.landings import Landing
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.record.record import Record

Gpu = tuple[int, int]


def hit_target(run: Record, fault: PlannedFault, hits: Sequence[Event]) -> Target:
    """The target with the ranks that its nodes had when it landed; as it was planned, where that can't be told."""
    if not fault.target.nodes or not hits:
        return fault.target
    there = _there(run, hits[0])
    ranks = {up.rank for up in there if up.data["node"] in fault.target.nodes and up.rank is not None}
    return Target(tuple(sorted(ranks)), fault.target.nodes) if there else fault.target


def strayed(run: Record, fault: PlannedFault, hits: Sequence[Event]) -> str | None:
    """How it missed the nodes that it was to hit: one had no rank, or another one felt it."""
    for hit in hits:
        there = {up.data["node"] for up in _there(run, hit)}
        idle = set(fault.target.nodes) - there if there else set()
        if idle:
            where = ", ".join(map(str, sorted(there)))
            return f"node {min(idle)} had no rank when it came; the ranks were on node{'s' * (len(there) > 1)} {where}"
    pids = {hit.data["pid"] for hit in hits}
    meant = set(fault.target.nodes) or {up.data["node"] for up in run.of_kind(Kind.RANK_UP) if up.data["pid"] in pids}
    felt_on = {effect.data["node"] for effect in run.of_fault(fault.id, Kind.EFFECT) if "node" in effect.data}
    others = felt_on - meant if meant else set()
    return f"it was felt on node {min(others)}, which is not its target" if others else None


def _there(run: Record, hit: Event) -> list[Event]:
    """The ranks of the latest attempt of which any had come up by then."""
    ups = list(run.of_kind(Kind.RANK_UP))
    latest = max((up.attempt or 0 for up in ups if up.mono_s <= hit.mono_s), default=None)
    return [up for up in ups if up.attempt == latest]


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
