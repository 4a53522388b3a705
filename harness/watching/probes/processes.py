"""Which processes are the ranks. Pure: works on a census.

A rank is what torchelastic's agent started, found by its environment (RANK, LOCAL_RANK and TORCHELASTIC_RUN_ID) and by
its place in the tree; the environment alone says nothing, since data-loader workers inherit it. Where a wrapper was
started (`torchrun --no-python wrapper.sh`), the rank is the trainer below it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchaos.harness.contracts import RankProcess
from torchaos.harness.watching.probes.census import Identity, Member

_WRAPPER_S = 3.0  # a wrapper that has started no Python by then is taken for the rank itself
_CLAIM_S = 1.0  # so long may the sources differ: each has a delay of its own

Key = tuple[int, int]  # attempt, rank


@dataclass(frozen=True)
class Found:
    ranks: dict[Key, Member]
    ambiguous: dict[Key, tuple[int, ...]]  # pids of several candidates: none is taken
    agents: dict[int, Member]  # torchelastic's agent of each node


def find_ranks(members: Mapping[int, Member], armed: Iterable[int], now_s: float) -> Found:
    """`armed`: pids in which our agent said that it started. `now_s`: CLOCK_MONOTONIC."""
    by_key, agents, armed = defaultdict(list), {}, set(armed)
    below: dict[Member, list[Member]] = defaultdict(list)
    for member in members.values():
        for above in member.ancestors():
            below[above].append(member)
    for top in members.values():
        if not _is_top(top) or top.identity is None or top.parent is None:
            continue
        if top.parent.alive:
            agents[top.identity.node] = top.parent
        for one in _trainers(top, below[top], armed, now_s):
            by_key[top.identity.attempt, top.identity.rank].append(one)
    ambiguous = {key: tuple(sorted(one.pid for one in some)) for key, some in by_key.items() if len(some) > 1}
    return Found({key: some[0] for key, some in by_key.items() if len(some) == 1}, ambiguous, agents)


def _is_top(member: Member) -> bool:
    """Started by a process that is no worker, nor below one."""
    parent = member.parent
    return parent is not None and member.identity is not None and not any(one.identity for one in member.ancestors())


def _trainers(top: Member, below: list[Member], armed: set[int], now_s: float) -> list[Member]:
    """The one process that trains, or several candidates, or none yet."""
    own = [one for one in (top, *below) if one.pid in armed and one.identity == top.identity]
    if own:
        return own
    if top.is_python:
        return [top]
    python = [one for one in below if one.is_python and one.identity == top.identity]
    first = [one for one in python if not any(above.is_python for above in _between(one, top))]
    return first or ([top] if now_s - top.seen_s > _WRAPPER_S else [])


def _between(low: Member, top: Member) -> Iterable[Member]:
    for above in low.ancestors():
        if above is top:
            return
        yield above


def rank_process(member: Member, identity: Identity) -> RankProcess:
    return RankProcess(
        identity.rank,
        identity.local_rank,
        identity.node,
        member.pid,
        member.ticks,
        identity.attempt,
        identity.world_size,
        identity.gpu,
        member.inner_pid,
    )


@dataclass
class Claims:
    """What others say about ranks, compared with what /proc shows; each difference is told once."""

    _open: dict[tuple[str, int], tuple[Key, float]] = field(default_factory=dict)

    def add(self, source: str, pid: int, key: Key) -> None:
        self._open[source, pid] = key, time.monotonic()

    def differences(self, members: Mapping[int, Member], now_s: float) -> list[str]:
        """Sentences about claims that /proc has not borne out in time."""
        told = []
        for (source, pid), (key, since_s) in list(self._open.items()):
            identity = members[pid].identity if pid in members else None
            if identity is not None and (identity.attempt, identity.rank) == key:
                del self._open[source, pid]
            elif now_s - since_s > _CLAIM_S:
                del self._open[source, pid]
                told.append(_difference(source, pid, key, members.get(pid)))
        return told


def _difference(source: str, pid: int, key: Key, member: Member | None) -> str:
    attempt, rank = key
    claim = f"{source} says that pid {pid} is rank {rank} in attempt {attempt}"
    if member is None:
        return f"{claim}; it was gone before it could be looked at, or is not a process of the job"
    if member.identity is None:
        return f"{claim}; its environment in /proc does not"
    return f"{claim}; its environment says rank {member.identity.rank} in attempt {member.identity.attempt}"
