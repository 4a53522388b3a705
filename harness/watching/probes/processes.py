"""Finds the processes that are ranks, in a census of the job's processes.

A rank is a process that torchelastic's agent started. It is recognized by its environment (RANK, LOCAL_RANK and
TORCHELASTIC_RUN_ID) and its place in the process tree; the environment alone is not enough, since data-loader workers
inherit it. If the agent started a wrapper (`torchrun --no-python wrapper.sh`), the rank is the trainer below it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchaos.harness.contracts import RankProcess
from torchaos.harness.watching.probes.census import Identity, Member

_WRAPPER_S = 3.0  # a wrapper that has started no Python within this time counts as the rank itself
_CLAIM_S = 1.0  # seconds for which the sources may differ, because each has its own delay

Key = tuple[int, int]  # attempt, rank


@dataclass(frozen=True)
class RanksFound:
    """The ranks and torchelastic agents that were found among the processes of a job."""

    ranks: dict[Key, Member]
    ambiguous: dict[Key, tuple[int, ...]]  # pids of several candidates for a rank: none is chosen
    agents: dict[int, Member]  # torchelastic's agent by node


def find_ranks(members: Mapping[int, Member], armed: Iterable[int], now_s: float) -> RanksFound:
    """Finds the ranks. `armed`: pids in which torchaos's agent reported its start; `now_s`: CLOCK_MONOTONIC."""
    by_key: dict[Key, list[Member]] = defaultdict(list)
    agents, armed = {}, set(armed)
    below: dict[Member, list[Member]] = defaultdict(list)
    for member in members.values():
        for above in member.ancestors():
            below[above].append(member)
    for top in members.values():
        if not _is_top(top) or top.identity is None or top.parent is None:
            continue
        if top.parent.alive:
            agents[top.identity.node] = top.parent
        by_key[top.identity.attempt, top.identity.rank] += _trainers(top, below[top], armed, now_s)
    ambiguous = {key: tuple(sorted(each.pid for each in found)) for key, found in by_key.items() if len(found) > 1}
    return RanksFound({key: found[0] for key, found in by_key.items() if len(found) == 1}, ambiguous, agents)


def _is_top(member: Member) -> bool:
    """Whether the process is a worker that was started by a process which is no worker and has no worker among its
    ancestors."""
    parent = member.parent
    return (
        parent is not None and member.identity is not None and not any(above.identity for above in member.ancestors())
    )


def _trainers(top: Member, below: list[Member], armed: set[int], now_s: float) -> list[Member]:
    """The process that trains. If it is not clear, all candidates; if there is none yet, an empty list."""
    own = [member for member in (top, *below) if member.pid in armed and member.identity == top.identity]
    if own:
        return own
    if top.is_python:
        return [top]
    python = [member for member in below if member.is_python and member.identity == top.identity]
    first = [member for member in python if not any(above.is_python for above in _between(member, top))]
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
    """Compares other sources' claims about ranks with /proc, and reports each difference once."""

    _open: dict[tuple[str, int], tuple[Key, float]] = field(default_factory=dict)

    def add(self, source: str, pid: int, key: Key) -> None:
        self._open[source, pid] = key, time.monotonic()

    def differences(self, members: Mapping[int, Member], now_s: float) -> list[str]:
        """Sentences about the claims that /proc has not confirmed in time."""
        sentences = []
        for (source, pid), (key, since_s) in list(self._open.items()):
            identity = members[pid].identity if pid in members else None
            if identity is not None and (identity.attempt, identity.rank) == key:
                del self._open[source, pid]
            elif now_s - since_s > _CLAIM_S:
                del self._open[source, pid]
                sentences.append(_difference(source, pid, key, members.get(pid)))
        return sentences


def _difference(source: str, pid: int, key: Key, member: Member | None) -> str:
    attempt, rank = key
    claim = f"{source} says that pid {pid} is rank {rank} in attempt {attempt}"
    if member is None:
        return f"{claim}; it was gone before it could be looked at, or is not a process of the job"
    if member.identity is None:
        return f"{claim}; its environment in /proc does not"
    return f"{claim}; its environment says rank {member.identity.rank} in attempt {member.identity.attempt}"
