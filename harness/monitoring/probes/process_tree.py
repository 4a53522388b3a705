"""Keeps track of all processes of a job, and finds its ranks and torchelastic's agents among them. This costs little,
because a process that does not belong to the job is examined only once.

A process belongs to the job if its parent does, or if the job's mark is in its environment (its parent may be gone).
The original parent is remembered, so that an orphan keeps its place in the tree.

A rank is a process that torchelastic's agent started. It is recognised by its environment (RANK, LOCAL_RANK and
TORCHELASTIC_RUN_ID) and its place in the process tree. The environment alone is not enough, because data-loader workers
inherit it. If the agent started a wrapper (`torchrun --no-python wrapper.sh`), the rank is the trainer below the
wrapper."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchaos.harness.host import processes
from torchaos.harness.host.gpu_devices import gpu_of
from torchaos.harness.interfaces import RankProcess, UsageError
from torchaos.harness.protocol.wire import ENV_NODE, ENV_REPLICA, ENV_RUN_ID, attempt_of, rank_of

if TYPE_CHECKING:  # not imported when assertions import this module: they examine no processes
    import psutil

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
            # GROUP_RANK comes last, because a node may get another number in the next rendezvous.
            node = int(environ.get(ENV_NODE) or environ.get(ENV_REPLICA) or environ.get("GROUP_RANK", "0"))
            size = int(environ.get("WORLD_SIZE", "0"))
            return cls(rank, local_rank, size, node, attempt, gpu_of(environ, local_rank))
        return None


@dataclass(eq=False)
class Member:
    """One process of the job. `parent`: the process that started it, even if that has ended."""

    pid: int
    ticks: int  # start time, clock ticks since boot
    parent: Member | None
    seen_s: float  # first seen, CLOCK_MONOTONIC
    identity: Identity | None = None
    is_python: bool = False
    alive: bool = True
    inner_pid: int = 0  # see RankProcess
    node: int | None = None  # the number of its node; None: as its environment says

    @property
    def own_pid(self) -> int:
        return self.inner_pid or self.pid

    def ancestors(self) -> Iterator[Member]:
        above = self.parent
        while above:
            yield above
            above = above.parent

    def look(self) -> None:
        """Reads the facts that change if the process execs another program."""
        found = Identity.of(environ_of(self.pid))
        if found is not None:
            self.identity = found if self.node is None else replace(found, node=self.node)
        self.is_python = _is_python(self.pid)
        self.inner_pid = processes.inner_pid(self.pid)


@dataclass
class ProcessTree:
    """The live processes of a job. `run_id`: the mark in their environment; None if torchaos did not launch the job.
    `node`: the node of all of them; None if the environment of each process names its node. Not thread-safe."""

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
        """Lets the next scan examine a pid again, because it may have belonged to another process before."""
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
        """Adds the processes that belong to the job. Parents come before children, because a child of a member belongs
        to the job, too."""
        waiting = {pid: found for pid in pids if (found := processes.stat(pid))}
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
    """The environment with which a process was started. Empty if the process is gone or belongs to another user."""
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


_AGENTS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "torch/distributed/run.py")


def check_agent(pid: int) -> int:
    """The start time, in clock ticks since boot, of the torchelastic agent `pid`. Raises UsageError if `pid` is not a
    torchelastic agent of this user."""
    import psutil

    found = processes.stat(pid)
    if found is None or found.state in "ZX":
        raise UsageError(f"pid {pid}: there is no such process; give the pid of a running torchrun")
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid():
            raise UsageError(f"pid {pid} belongs to {process.username()}; run torchaos as that user")
        if Identity.of(environ_of(pid)):
            raise UsageError(f"pid {pid} is a rank; give the pid of its torchrun, which is {found.parent}")
        if not _is_agent(process):
            below = next((child.pid for child in process.children(recursive=True) if _is_agent(child)), None)
            hint = f"; the torchrun below it is {below}" if below else "; give the pid of a running torchrun"
            raise UsageError(f"pid {pid} ({process.name()}) is no torchelastic agent{hint}")
    except psutil.NoSuchProcess as error:
        raise UsageError(f"pid {pid}: it ended, or a process below it did; try again") from error
    except psutil.Error as error:
        raise UsageError(f"pid {pid} can't be looked at: {error}") from error
    return found.ticks


def torchrun_here() -> int:
    """The pid of the only torchelastic agent of this user that this process can see. Raises UsageError if there is
    none, if there are several, or if its environment can't be read."""
    import psutil

    found = [process for process in psutil.process_iter() if _is_ours(process)]
    if len(found) != 1:
        pids = ", ".join(str(process.pid) for process in found) or "none"
        raise UsageError(f"one process of user {os.getuid()} must be a torchrun here, and these are: {pids}")
    if not environ_of(found[0].pid):
        raise UsageError(f"the torchrun with pid {found[0].pid} can't be observed from here: it has other rights")
    return found[0].pid


def _is_ours(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.uids().real == os.getuid() and _is_agent(process)
    except psutil.Error:
        return False


def _is_agent(process: psutil.Process) -> bool:
    """Whether the process is a torchelastic agent: it has workers now, or it is a torchrun between two attempts."""
    if Identity.of(environ_of(process.pid)):
        return False
    if any(Identity.of(environ_of(child.pid)) for child in process.children()):
        return True
    command = process.cmdline()[:4]
    is_python = bool(command) and Path(command[0]).name.startswith(("python", "torchrun"))
    return is_python and any(part.endswith(_AGENTS) for part in command)


_WRAPPER_S = 3.0  # a wrapper that has started no Python within this time counts as the rank itself
_CLAIM_S = 1.0  # seconds for which two sources may differ, because one may be later

Key = tuple[int, int]  # attempt, rank


@dataclass(frozen=True)
class RanksFound:
    """The ranks and torchelastic agents that were found among the processes of a job."""

    ranks: dict[Key, Member]
    ambiguous: dict[Key, tuple[int, ...]]  # pids of several candidates for a rank: none is chosen
    agents: dict[int, Member]  # torchelastic's agent by node


def find_ranks(members: Mapping[int, Member], with_agent: Iterable[int], now_s: float) -> RanksFound:
    """Finds the ranks. `with_agent`: the pids in which an agent reported its start. `now_s`: CLOCK_MONOTONIC."""
    by_key: dict[Key, list[Member]] = defaultdict(list)
    agents, with_agent = {}, set(with_agent)
    below: dict[Member, list[Member]] = defaultdict(list)
    for member in members.values():
        for above in member.ancestors():
            below[above].append(member)
    for top in members.values():
        if not _is_top(top) or top.identity is None or top.parent is None:
            continue
        if top.parent.alive:
            agents[top.identity.node] = top.parent
        by_key[top.identity.attempt, top.identity.rank] += _trainers(top, below[top], with_agent, now_s)
    ambiguous = {key: tuple(sorted(each.pid for each in found)) for key, found in by_key.items() if len(found) > 1}
    return RanksFound({key: found[0] for key, found in by_key.items() if len(found) == 1}, ambiguous, agents)


def _is_top(member: Member) -> bool:
    """Whether the process is the topmost worker of its branch: no process among its ancestors is a worker."""
    parent = member.parent
    return (
        parent is not None and member.identity is not None and not any(above.identity for above in member.ancestors())
    )


def _trainers(top: Member, below: list[Member], with_agent: set[int], now_s: float) -> list[Member]:
    """The process that trains, in or below the worker `top`. If this is not clear, all candidates. Empty if there is
    none yet."""
    own = [member for member in (top, *below) if member.pid in with_agent and member.identity == top.identity]
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
    """Compares what other sources say about ranks (claims) with /proc, and reports each difference once."""

    _open: dict[tuple[str, int], tuple[Key, float]] = field(default_factory=dict)

    def add(self, source: str, pid: int, key: Key) -> None:
        self._open[source, pid] = key, time.monotonic()

    def differences(self, members: Mapping[int, Member], now_s: float) -> list[str]:
        """A sentence for each claim that /proc has not confirmed in time."""
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
