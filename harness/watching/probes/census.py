"""Keeps track of all processes of a job at a low cost: a process that does not belong to the job is examined only once.

A process belongs to the job if its parent does, or if the job's mark is in its environment (its parent may be gone).
The original parent is remembered, so that an orphan keeps its place in the tree."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torchaos.harness.agent.wire import ENV_NODE, ENV_REPLICA, ENV_RUN_ID, attempt_of, rank_of
from torchaos.harness.machine import proc
from torchaos.harness.machine.gpus import gpu_of

_YOUNG_S = 10.0  # a younger process may still exec another program, as after a fork or in a shell wrapper


@dataclass(frozen=True)
class Identity:
    """The values that torchelastic put into the environment of a worker. Child processes of the worker inherit them."""

    rank: int
    local_rank: int
    world_size: int
    node: int
    attempt: int
    gpu: int | None = None  # NVML's index, see gpu_of

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Identity | None:
        with suppress(KeyError, ValueError):
            attempt = attempt_of(environ)
            rank, local_rank, _run = rank_of(environ), int(environ["LOCAL_RANK"]), environ["TORCHELASTIC_RUN_ID"]
            # Torchelastic numbers the nodes again in each rendezvous, so a surviving node may get another number.
            node = int(environ.get(ENV_NODE) or environ.get(ENV_REPLICA) or environ.get("GROUP_RANK", "0"))
            size = int(environ.get("WORLD_SIZE", "0"))
            return cls(rank, local_rank, size, node, attempt, gpu_of(environ, local_rank))
        return None


@dataclass(eq=False)
class Member:
    """One process of the job. `parent` is the process that started it, even if the parent has ended."""

    pid: int
    ticks: int  # start time, clock ticks since boot
    parent: Member | None
    seen_s: float  # first seen, CLOCK_MONOTONIC
    identity: Identity | None = None
    is_python: bool = False
    alive: bool = True
    inner_pid: int = 0  # see RankProcess
    node: int | None = None  # the number of its node, if that is known better than from its environment

    @property
    def own_pid(self) -> int:
        return self.inner_pid or self.pid

    def ancestors(self) -> Iterator[Member]:
        above = self.parent
        while above:
            yield above
            above = above.parent

    def look(self) -> None:
        """Reads the facts that change when the process execs another program."""
        found = Identity.of(environ_of(self.pid))
        if found is not None:
            self.identity = found if self.node is None else replace(found, node=self.node)
        self.is_python = _is_python(self.pid)
        self.inner_pid = proc.inner_pid(self.pid)


@dataclass
class Census:
    """The live processes of a job. `run_id`: the mark in their environment; None if torchaos did not launch the job.
    `node`: the node of all of them; None: their environment says it. Not thread-safe."""

    run_id: str | None
    node: int | None = None
    members: dict[int, Member] = field(default_factory=dict)  # live processes by pid
    changed_s: float = 0.0  # when a process was seen to come or go, CLOCK_MONOTONIC
    _roots: set[int] = field(default_factory=set)
    _strangers: set[int] = field(default_factory=set)

    def add_root(self, pid: int) -> None:
        """Makes a process and its descendants members of the job."""
        self._roots.add(pid)
        self._strangers.discard(pid)

    def look_again(self, pid: int) -> None:
        """Examines a pid again at the next scan: it may have belonged to another process before."""
        self._strangers.discard(pid)

    def scan(self) -> None:
        """Brings the members up to date with /proc."""
        now, pids = time.monotonic(), {int(name) for name in os.listdir("/proc") if name.isdigit()}
        before = set(self.members)
        self._strangers &= pids
        for pid in self.members.keys() - pids:
            self.members.pop(pid).alive = False
            self._roots.discard(pid)
        self._admit(pids - self.members.keys() - self._strangers, now)
        if self.members.keys() != before:
            self.changed_s = now
        for member in self.members.values():
            if not (member.is_python and member.identity) and now - member.seen_s < _YOUNG_S:
                member.look()

    def _admit(self, pids: Iterable[int], now: float) -> None:
        """Adds the processes that belong to the job, parents before children, because a child of a member belongs to
        the job too."""
        waiting = {pid: found for pid in pids if (found := proc.stat(pid))}
        joined = True
        while joined:
            joined = False
            for pid, found in list(waiting.items()):
                if pid in self._roots or found.parent in self.members:
                    self.members[pid] = Member(pid, found.ticks, self.members.get(found.parent), now, node=self.node)
                    del waiting[pid]
                    joined = True
            if not joined and (marked := next((pid for pid in waiting if self._is_marked(pid)), None)):
                self.members[marked] = Member(marked, waiting.pop(marked).ticks, None, now)
                joined = True
        self._strangers.update(waiting)

    def _is_marked(self, pid: int) -> bool:
        return self.run_id is not None and environ_of(pid).get(ENV_RUN_ID) == self.run_id


def environ_of(pid: int) -> dict[str, str]:
    """The environment with which a process was started; empty if it is gone or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = file.read().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False
