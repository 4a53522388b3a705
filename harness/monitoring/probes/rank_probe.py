"""Watches the ranks from outside, periodically and in one thread: when each is up, stopped, stuck in the kernel, or
gone, and its exit code. `Sockets` examines their TCP sockets, and `Sampling` calls other probes.

The thread holds a pidfd for each rank, so that an exit is noticed at once, whichever process waits for the rank."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from torchaos.harness.host import processes
from torchaos.harness.interfaces import Emit, Probe, RankProcess
from torchaos.harness.monitoring.probes.process_tree import (
    Claims,
    Key,
    ProcessTree,
    RanksFound,
    find_ranks,
    rank_process,
)
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import Journal

_SS_S = 5.0  # seconds; usually ss needs 10 ms, but much longer on a busy machine
# Bytes that were received, and bytes that a peer has confirmed. `bytes_sent` does not show that data arrives: it also
# counts retransmissions, so it grows without a receiver.
_ARRIVED = re.compile(r"\bbytes_(?:acked|received):(\d+)")
_BACKOFF, _UNACKED = re.compile(r"\bbackoff:(\d+)"), re.compile(r"\bunacked:\d+")
_LOST_TWICE = 2  # retransmissions of a segment; a healthy network loses a segment now and then


class Sockets:
    """The state of the ranks' sockets. `moved`: bytes were transported since the previous look. `stuck`: data of a rank
    is sent again and again. `losing`: data was sent again at least once. `blind`: why the sockets can't be read; empty
    if they can."""

    def __init__(self) -> None:
        self.moved = self.stuck = self.losing = False
        self.blind = ""
        self._bytes: int | None = None

    def look(self, ranks: Sequence[RankProcess]) -> None:
        self.moved = self.stuck = self.losing = False
        try:
            infos = list(_infos(ranks))
        except (OSError, subprocess.SubprocessError) as error:
            self.blind = f"ss can't read the ranks' sockets: {error}"
            return
        self.blind = ""
        total = sum(int(number) for info in infos for number in _ARRIVED.findall(info))
        before, self._bytes = self._bytes, total
        self.moved = before is not None and total != before
        lost = max(map(_lost, infos), default=0)
        self.stuck, self.losing = lost >= _LOST_TWICE, lost > 0

    def forget(self) -> None:
        """Forgets the counters, so that bytes that come before the next look do not count."""
        self._bytes, self.blind = None, ""


def _lost(info: str) -> int:
    """How often unconfirmed data was sent again. 0 if a peer only reads slowly, because then no data is on the way: the
    kernel only asks the peer for room."""
    backoff = _BACKOFF.search(info)
    return int(backoff[1]) if backoff and _UNACKED.search(info) else 0


def _infos(ranks: Sequence[RankProcess]) -> Iterable[str]:
    """Yields ss's description of each TCP socket of the ranks. Raises OSError or SubprocessError if ss fails."""
    pids = {f"pid={rank.pid}," for rank in ranks}
    for prefix in _namespaces(ranks):
        argv = [*prefix, "ss", "-tinpH"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SS_S, check=True)
        for head, info in pairwise(done.stdout.splitlines()):
            if any(pid in head for pid in pids):
                yield info


def _namespaces(ranks: Sequence[RankProcess]) -> Iterable[list[str]]:
    """For each network namespace of the ranks, the command prefix that enters it."""
    found: dict[int, list[str]] = {}
    own = os.stat("/proc/self/ns/net").st_ino
    for rank in ranks:
        with suppress(OSError):
            space = os.stat(f"/proc/{rank.pid}/ns/net").st_ino
            found.setdefault(space, [] if space == own else ["nsenter", f"--net=/proc/{rank.pid}/ns/net"])
    return found.values()


class Sampling:
    """Calls all probes in one thread, at the shortest of their periods. Without probes, no thread is started."""

    def __init__(self, probes: Sequence[Probe], emit: Emit) -> None:
        self._probes, self._emit = probes, emit
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)

    def start(self) -> None:
        if self._probes:
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Each probe is called one last time."""
        if self._thread.ident is not None and not self._ended.is_set():
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        period_s = min(probe.period_s for probe in self._probes)
        while not self._ended.wait(period_s):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        for probe in self._probes:
            probe.sample(self._emit)


STATE_S = 0.05  # seconds between samples of the ranks' states
# Seconds between scans of all processes; and if no process of the job came or went for CALM_S seconds.
SCAN_S, CALM_SCAN_S = 0.1, 0.5
CALM_S = 10.0
_REPORTED_STATES = "TtZD"  # other states come and go all the time
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3  # linux/pidfd.h, since Linux 6.15


@dataclass
class _Watched:
    """A rank that is watched, with the letter of its process state."""

    rank: RankProcess
    pidfd: int
    state: str = "R"  # as seen last
    reported: str = "R"  # as in the last event


class RankWatch:
    """Watches the ranks of one job. `mark`: the run id in the environment of its processes; None if torchaos did not
    launch the job. `node`: see ProcessTree."""

    def __init__(self, journal: Journal, mark: str | None, node: int | None = None) -> None:
        self._journal = journal
        self._tree = ProcessTree(mark, node)
        self._claims = Claims()
        self._watched: dict[int, _Watched] = {}  # by pidfd
        self._over: set[tuple[int, int]] = set()  # (pid, start_ticks) of ranks that are gone
        self._found = RanksFound({}, {}, {})
        self._refused: set[Key] = set()
        self._with_agent: set[int] = set()
        self._scan_s = 0.0  # when the next scan is due, CLOCK_MONOTONIC
        self._hints: deque[Event] = deque()
        self._roots: deque[int] = deque()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self) -> None:
        self._journal.listen(self._note)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch. Exits that happened before are recorded when this returns."""
        if self._thread.ident is not None and not self._ended.is_set():
            self._ended.set()
            os.eventfd_write(self._wake, 1)
            self._thread.join()

    def add_root(self, pid: int) -> None:
        """Adds a process from which the job descends, such as a command that was just started."""
        self._roots.append(pid)
        os.eventfd_write(self._wake, 1)

    def ranks(self) -> dict[int, RankProcess]:
        """The live process of each rank in its latest attempt, by rank number. A rank is left out if several processes
        could be it."""
        with self._lock:
            living = [watched.rank for watched in self._watched.values()]
            unclear = set(self._found.ambiguous)
        in_order = sorted(living, key=lambda process: (process.attempt, self._is_chosen(process)))
        newest = {process.rank: process for process in in_order}
        return {rank: process for rank, process in newest.items() if (process.attempt, rank) not in unclear}

    def agents(self) -> dict[int, tuple[int, int]]:
        """Torchelastic's live agents: (pid, start_ticks) by node."""
        with self._lock:
            return {node: (agent.pid, agent.ticks) for node, agent in self._found.agents.items() if agent.alive}

    def members(self) -> dict[int, int]:
        """All processes of the job that are alive now: start time in clock ticks, by pid."""
        with self._lock:
            self._tree.scan()
            return {pid: member.ticks for pid, member in self._tree.members.items()}

    def _is_chosen(self, rank: RankProcess) -> bool:
        chosen = self._found.ranks.get((rank.attempt, rank.rank))
        return chosen is not None and chosen.pid == rank.pid

    def _note(self, event: Event) -> None:
        """Lets a scan follow at once if the event reports the start of a rank. The journal calls this for each
        event."""
        started = event.kind is Kind.ELASTIC_WORKER and event.data["state"] == "START"
        if started or event.kind is Kind.AGENT_STARTED:
            self._hints.append(event)
            with suppress(OSError):
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # the job goes on, and the note tells the verdict what was not seen
            text = f"the ranks are no longer watched: {type(error).__name__}: {error}"
            self._journal.emit(Kind.NOTE, {"text": text})

    def _watch(self) -> None:
        sample_s = time.monotonic()  # when the next sample is due
        while not self._ended.is_set():
            self._take_exits(max(0.0, sample_s - time.monotonic()))
            if is_due := time.monotonic() >= sample_s:
                self._sample_states()
            if (is_due and time.monotonic() >= self._scan_s) or self._hints or self._roots:
                self._scan()
            if is_due:
                sample_s = time.monotonic() + STATE_S
        self._take_exits(0.0)
        for fd in self._watched:
            os.close(fd)

    def _take_exits(self, wait_s: float) -> None:
        ready = self._poll.poll(wait_s * 1000)
        now = time.monotonic()
        for fd, _events in ready:
            if fd == self._wake:
                os.eventfd_read(self._wake)
                continue
            with self._lock:
                gone = self._watched.pop(fd)
                self._over.add((gone.rank.pid, gone.rank.start_ticks))
            self._poll.unregister(fd)
            self._scan_s = now
            rank = gone.rank
            data = {
                "pid": rank.pid,
                "start_ticks": rank.start_ticks,
                "exit_code": exit_code(rank.pid, rank.start_ticks, fd),
            }
            self._journal.emit(Kind.RANK_EXITED, data, rank=rank.rank, attempt=rank.attempt, mono_s=now)
            os.close(fd)

    def _sample_states(self) -> None:
        for watched in self._watched.values():
            found = processes.stat(watched.rank.pid)
            if found is None or found.ticks != watched.rank.start_ticks:
                continue
            last, watched.state = watched.state, found.state
            state = found.state if found.state in _REPORTED_STATES else "R"
            if state == "D" and last != "D":  # each read from a disk is a short D, so only a longer D is reported
                continue
            if state != watched.reported:
                watched.reported = state
                data = {"pid": watched.rank.pid, "state": found.state}
                self._journal.emit(Kind.RANK_STATE, data, rank=watched.rank.rank, attempt=watched.rank.attempt)

    def _scan(self) -> None:
        while self._roots:
            self._tree.add_root(self._roots.popleft())
        hints = [self._hints.popleft() for _ in range(len(self._hints))]
        for event in hints:
            self._tree.look_again(event.data["pid"])
        with self._lock:
            self._tree.scan()
            for event in hints:
                self._take_hint(event)
            members, now = self._tree.members, time.monotonic()
            is_calm = now > self._tree.changed_s + CALM_S
            self._scan_s = now + (CALM_SCAN_S if is_calm else SCAN_S)
            living = {pid: member for pid, member in members.items() if (pid, member.ticks) not in self._over}
            self._found = find_ranks(living, self._with_agent, now)
            differences = self._claims.differences(members, now)
        for text in differences:
            self._journal.emit(Kind.NOTE, {"text": text})
        self._tell_ambiguous()
        self._watch_new()

    def _take_hint(self, event: Event) -> None:
        pid = self._outer_pid(event)
        if event.kind is Kind.AGENT_STARTED:
            self._with_agent.add(pid)
        if event.rank is not None and event.attempt is not None:
            source = "the agent" if event.kind is Kind.AGENT_STARTED else "torchelastic"
            self._claims.add(source, pid, (event.attempt, event.rank))

    def _outer_pid(self, event: Event) -> int:
        """The pid, outside containers, of the process in an event. An agent in a container reports its inner pid."""
        own, key = int(event.data["pid"]), (event.attempt, event.rank)
        for member in self._tree.members.values():
            if member.inner_pid == own and member.identity and (member.identity.attempt, member.identity.rank) == key:
                return member.pid
        return own

    def _tell_ambiguous(self) -> None:
        for key, pids in self._found.ambiguous.items():
            if key not in self._refused:
                self._refused.add(key)
                names = " and ".join(str(pid) for pid in pids)
                text = f"pids {names} could each be rank {key[1]} in attempt {key[0]}; this rank counts as unknown"
                self._journal.emit(Kind.NOTE, {"text": text})

    def _watch_new(self) -> None:
        known = {(rank.rank.pid, rank.rank.start_ticks) for rank in self._watched.values()} | self._over
        for (attempt, _rank), member in self._found.ranks.items():
            identity = member.identity
            if identity is None or (member.pid, member.ticks) in known:
                continue
            try:
                fd = os.pidfd_open(member.pid)
            except OSError:
                continue
            if (found := processes.stat(member.pid)) is None or found.ticks != member.ticks:
                os.close(fd)
                continue
            rank = rank_process(member, identity)
            with self._lock:
                self._watched[fd] = _Watched(rank, fd)
            self._poll.register(fd, select.POLLIN)
            data = {
                "pid": rank.pid, "start_ticks": rank.start_ticks, "local_rank": rank.local_rank,
                "world_size": rank.world_size, "node": rank.node, "gpu": rank.gpu,
                **({"inner_pid": rank.inner_pid} if rank.inner_pid else {}),
            }  # fmt: skip
            self._journal.emit(Kind.RANK_UP, data, rank=rank.rank, attempt=attempt)


def exit_code(pid: int, ticks: int, pidfd: int) -> int | None:
    """The exit code of a process that has just ended; if negative, the signal that killed it. It is read from the
    zombie or, if the process was reaped, from the kernel's record at the pidfd. None if the kernel keeps no record."""
    status = _zombie_status(pid, ticks)
    if status is None:
        status = _kept_status(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _zombie_status(pid: int, ticks: int) -> int | None:
    found = processes.stat(pid)
    return found.status if found and found.state == "Z" and found.ticks == ticks else None


def _kept_status(pidfd: int) -> int | None:
    info = bytearray(struct.pack("<Q56x", _PIDFD_INFO_EXIT))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    return int(struct.unpack_from("<i", info, 60)[0]) if struct.unpack_from("<Q", info)[0] & _PIDFD_INFO_EXIT else None
