"""Finds the ranks that hold up a running job, from process states, the agent's stamps, and Python stacks.

py-spy reads the stacks. If it can't, the agents of the ranks write their stacks when they get a signal
(`agent/startup.py`); this is used only when the job is about to be ended."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchaos.harness import protocol
from torchaos.harness.host import processes
from torchaos.harness.interfaces import RankProcess, UsageError
from torchaos.harness.monitoring.diagnosis import blame
from torchaos.harness.monitoring.diagnosis.diagnosis import HIGH, LOW, MEDIUM, Diagnosis
from torchaos.harness.monitoring.diagnosis.wait_graph import Calls, ranges, read_stamps
from torchaos.harness.monitoring.probes.process_tree import ProcessTree, check_agent, find_ranks, rank_process
from torchaos.harness.monitoring.probes.rank_probe import Sockets
from torchaos.harness.protocol.wire import STACKS_SIGNAL

_TIMEOUT_S = 5.0
_HARNESS = Path(protocol.__file__).parents[1]
_AGENT = tuple(f"{above}/{room}/" for above in (_HARNESS, "/torchaos/harness") for room in ("agent", "protocol"))
_STDLIB = sysconfig.get_paths()["stdlib"].rpartition("/")[2]  # such as python3.11; the job may use another Python
_COLLECTIVES = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")


@dataclass(frozen=True)
class Frame:
    function: str
    file: str
    line: int

    @property
    def is_of_agent(self) -> bool:
        """Whether the frame belongs to torchaos's agent, whose hooks stand between the job and the functions that it
        calls."""
        return any(part in self.file for part in _AGENT)

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Stack:
    """The frames of a main thread, the innermost first."""

    pid: int
    frames: tuple[Frame, ...]

    @property
    def at(self) -> Frame | None:
        """The innermost frame outside Python's standard library, or else the innermost frame of all."""
        own = [frame for frame in self.frames if not _is_stdlib(frame.file)]
        return own[0] if own else (self.frames[0] if self.frames else None)

    @property
    def user(self) -> Frame | None:
        """The innermost frame outside the standard library, installed packages and our agent. None if there is none."""
        own = [
            frame for frame in self.frames
            if not _is_stdlib(frame.file) and "site-packages" not in frame.file and not frame.is_of_agent
        ]  # fmt: skip
        return own[0] if own else None

    @property
    def place(self) -> str:
        """The frame that is most useful for the user, in words."""
        return str(self.user or self.at or "no Python code")

    @property
    def waits_for_others(self) -> bool:
        """Whether the rank is in torch's code for collectives, or in a backward, whose hooks call collectives."""
        return self.at is not None and any(part in self.at.file for part in _COLLECTIVES)

    @property
    def kind(self) -> tuple[tuple[str, str], ...]:
        """The functions without line numbers, by which stacks are compared."""
        return tuple((frame.function, frame.file) for frame in self.frames)


def find_py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def sample(pids: Sequence[int], py_spy: str) -> dict[int, Stack]:
    """The stacks of these processes, by pid. Processes that can't be read are left out. The processes are not paused
    while they are read, so one stack may mix states that are microseconds apart."""
    running = {
        pid: subprocess.Popen(
            [py_spy, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for pid in pids
    }
    found = {}
    for pid, process in running.items():
        try:
            text = process.communicate(timeout=_TIMEOUT_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            continue
        if process.returncode == 0 and (stack := parse(pid, text)):
            found[pid] = stack
    return found


def parse(pid: int, text: bytes | str) -> Stack | None:
    """The stack of the main thread, from py-spy's JSON. None if it can't be read."""
    try:
        threads = json.loads(text)
        main = next(
            (thread for thread in threads if thread.get("thread_name") == "MainThread"), threads[0] if threads else None
        )
        if main is None:
            return None
        frames = [Frame(str(thread["name"]), str(thread["filename"]), int(thread["line"])) for thread in main["frames"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Stack(pid, tuple(frames))


def outliers(stacks: Mapping[int, Stack], groups: Iterable[Sequence[int]] = ()) -> dict[int, str]:
    """The ranks whose stacks differ from those of the others, each with a sentence.

    If some ranks wait in collectives, these are the ranks that do not wait. Otherwise they are the few ranks whose
    stack is not that of the majority; a rank may wait for its GPU at any place. If no stack has a majority, as in a
    pipeline, each process group in `groups` is examined alone, and the first result is returned."""
    waiting = [rank for rank, stack in stacks.items() if stack.waits_for_others]
    if waiting:
        elsewhere = [rank for rank in stacks if rank not in waiting]
        return {rank: f"it is at {stacks[rank].place}, while the others wait in collectives" for rank in elsewhere}
    found = _few(stacks)
    for group in groups if found is None else ():
        members = {rank: stacks[rank] for rank in group if rank in stacks}
        if len(members) > 2 and (few := _few(members)):
            return few
    return found or {}


def _few(stacks: Mapping[int, Stack]) -> dict[int, str] | None:
    """The ranks whose stack is not that of the majority, each with a sentence. None if no stack has a majority."""
    kinds = Counter(stack.kind for stack in stacks.values())
    (usual, many), *_ = kinds.most_common() or [((), 0)]
    if 2 * many <= len(stacks):
        return None
    most = next(stack.place for stack in stacks.values() if stack.kind == usual)
    elsewhere = [rank for rank, stack in stacks.items() if stack.kind != usual]
    return {rank: f"it is at {stacks[rank].place}, while most are at {most}" for rank in elsewhere}


def _is_stdlib(file: str) -> bool:
    inside = f"/{_STDLIB[:6]}3." in file if _STDLIB.startswith("python") else False
    return file.startswith("<frozen") or (inside and "site-packages" not in file) or "/" not in file


_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_WAIT_S, _LOOK_S = 3.0, 0.05  # seconds; a stack is complete when its file did not grow between two looks


def ask(ranks: Mapping[int, RankProcess], folder: Path) -> dict[int, Stack]:
    """The stacks of these ranks, by rank, written by their agents. Ranks that don't answer are left out. `folder`: the
    folder into which the agents write."""
    asked = {}
    for rank, process in ranks.items():
        files = [path for path in folder.glob(f"rank{rank}-a{process.attempt}-p*.txt") if path.is_file()]
        if files and _handles_it(process.pid):
            path = max(files, key=lambda file: file.stat().st_mtime)
            before = path.stat().st_size
            with suppress(OSError), processes.hold(process.pid, process.start_ticks) as fd:
                if fd is not None:
                    signal.pidfd_send_signal(fd, STACKS_SIGNAL)
                    asked[rank] = path, before
    end = time.monotonic() + _WAIT_S
    found: dict[int, Stack] = {}
    sizes: dict[int, int] = {}
    while asked.keys() - found.keys() and time.monotonic() < end:
        time.sleep(_LOOK_S)
        for rank, (path, before) in asked.items():
            size = path.stat().st_size
            if size > before and sizes.get(rank) == size:
                found[rank] = Stack(ranks[rank].pid, parse_dump(path.read_bytes()[before:].decode(errors="replace")))
            sizes[rank] = size
    return found


def parse_dump(text: str) -> tuple[Frame, ...]:
    """The frames of a stack as faulthandler writes it (Python/traceback.c), the innermost first."""
    return tuple(Frame(function, file, int(line)) for file, line, function in _FRAME.findall(text))


def _handles_it(pid: int) -> bool:
    """Whether the process has a handler for the signal; see SigCgt in proc_pid_status(5). Without a handler, the signal
    would kill it."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


_STUCK = {
    "T": "it is stopped (by a signal)",
    "t": "it is stopped (by a debugger)",
    "Z": "it is dead",
    "X": "it is dead",
}
_ASLEEP_S, _LOOKS = 0.2, 5
# Seconds between looks at the stacks: irregular, so that they do not keep pace with the job's steps.
_MOMENTS_S = (0.0, 0.31, 0.53, 0.17, 0.71, 0.23, 0.43, 0.13, 0.37, 0.61)


def diagnose(
    ranks: Mapping[int, RankProcess], world: int = 0, stamps: Path | None = None, hangs: bool = False,
    py_spy: Callable[[], str | None] = find_py_spy, seen: Mapping[int, Stack] | None = None,
) -> Diagnosis:  # fmt: skip
    """The diagnosis of a live job.

    `world`: the number of ranks that should exist. `stamps`: the folder of the agent's stamps. `hangs`: whether the job
    is known to hang; then one look at the stacks is enough, otherwise several looks take some seconds. `py_spy`: finds
    the program that reads stacks. `seen`: the stacks of a job that hangs, by rank, if they were read already.

    A process that is stopped or missing explains a hang alone. So does a network that loses the data that a rank sends;
    then no rank is blamed for a wait. Next in weight are the stamps, which show the collective in which each rank is,
    and then the stacks."""
    states = _states(ranks)
    found = Diagnosis()
    gone = set(range(world)) - set(ranks)
    for rank in gone:
        found.blame([rank], HIGH, "it has no process")
    for rank, state in states.items():
        if state in _STUCK:
            found.blame([rank], HIGH, _STUCK[state])
    calls = read_stamps(stamps, None if hangs else time.monotonic()) if stamps and stamps.is_dir() else Calls({})
    said = blame.diagnose(calls)
    found.problems += said.problems
    groups = {members for record in calls.ranks.values() for members in record.groups.values()}
    looks = 1 if hangs or found.culprits else len(_MOMENTS_S)
    in_groups = sorted(groups, key=len)
    odd = outliers(seen, in_groups) if seen is not None else _by_stacks(ranks, in_groups, found, looks, py_spy())
    for rank, state in states.items():
        if state == "D" and (
            hangs or rank in odd or rank in said.culprits
        ):  # a rank that is not noticed otherwise may be writing a checkpoint
            found.blame([rank], MEDIUM, "it is in an uninterruptible sleep in the kernel")
    _weigh(found, said, odd, ranks)
    found.suspect(said.suspects - found.culprits if not found.culprits else ())
    found.problems += on_one_node(found.culprits or found.suspects, ranks)
    return found


def on_one_node(blamed: Collection[int], ranks: Mapping[int, RankProcess]) -> list[str]:
    """A note if several ranks are to blame and all are on one node, while the job has others: then the machine may be
    the cause."""
    nodes = {rank: process.node for rank, process in ranks.items()}
    theirs = {nodes.get(rank) for rank in blamed}
    node = next(iter(theirs), None)
    if len(blamed) < 2 or len(theirs) > 1 or node is None or set(nodes.values()) == theirs:
        return []
    many = sum(one == node for one in nodes.values())
    which = "all" if many == len(blamed) else f"{len(blamed)} of the {many}"
    return [f"{ranges(sorted(blamed))} are {which} ranks of node {node}, and no rank of another node is to blame"]


def _weigh(found: Diagnosis, said: Diagnosis, odd: Mapping[int, str], ranks: Mapping[int, RankProcess]) -> None:
    """Adds the findings from the stamps (`said`) and the stacks (`odd`), as far as the processes do not explain the
    hang."""
    if found.culprits:
        for rank in found.culprits:
            found.say(rank, *said.evidence.get(rank, []))
    elif (said.culprits or odd) and _is_cut(ranks):
        for rank in sorted(said.culprits | odd.keys()):
            found.suspect([rank], *said.evidence.get(rank, []), odd.get(rank, ""))
        found.suspect(ranks)
        found.problems.append(
            "data that a rank sends does not arrive, and the kernel sends it again and again: the network explains who "
            "waits for whom"
        )
    elif said.culprits:
        for rank in sorted(said.culprits):
            found.blame([rank], said.confidence, *said.evidence[rank], odd.get(rank, ""))
    elif odd:
        for rank, words in odd.items():
            found.blame([rank], MEDIUM, words)
        if 2 * len(odd) > len(ranks):
            found.confidence = LOW


def _states(ranks: Mapping[int, RankProcess]) -> dict[int, str]:
    """The letter of the process state of each rank, such as T, D or Z, if it was the same in all looks. Otherwise an
    empty text."""
    seen: dict[int, set[str]] = {rank: set() for rank in ranks}
    for number in range(_LOOKS):
        time.sleep(_ASLEEP_S / _LOOKS if number else 0)
        for rank, process in ranks.items():
            now = processes.stat(process.pid)
            seen[rank].add(now.state if now and now.ticks == process.start_ticks else "Z")
    return {rank: next(iter(states)) if len(states) == 1 else "" for rank, states in seen.items()}


def _is_cut(ranks: Mapping[int, RankProcess]) -> bool:
    sockets = Sockets()
    sockets.look(list(ranks.values()))
    return sockets.losing


def _by_stacks(
    ranks: Mapping[int, RankProcess], groups: Sequence[Sequence[int]], found: Diagnosis, looks: int,
    py_spy: str | None,
) -> dict[int, str]:  # fmt: skip
    """The ranks whose stack differs from the others' in each of several looks, with a sentence each. Empty if the
    stacks of the other ranks change between the looks: in a healthy job, too, some rank waits for another at any
    moment. Works for a stopped rank, too."""
    if py_spy is None:
        found.problems.append("py-spy is not installed, so no stacks were looked at; pip install 'torchaos[stacks]'")
        return {}
    odd, before = dict[int, str](), dict[int, Stack]()
    for number, seconds in enumerate(_MOMENTS_S[:looks]):
        time.sleep(seconds)
        by_pid = sample([process.pid for process in ranks.values()], py_spy)
        now = {rank: by_pid[process.pid] for rank, process in ranks.items() if process.pid in by_pid}
        seen = outliers(now, groups)
        odd = {rank: words for rank, words in seen.items() if not number or rank in odd}
        if any(now[rank] != before.get(rank, now[rank]) for rank in now.keys() - odd.keys()):
            found.problems.append("the stacks of ranks that seem to wait change, so these ranks are working")
            return {}
        if not odd:
            return {}
        before = now
    if unread := sorted(set(ranks) - set(before)):
        found.problems.append(
            f"the stack of {ranges(unread)} could not be read (is py-spy allowed to? it needs ptrace)"
        )
    return odd


def of_job(pid: int, stamps: Path | None = None) -> Diagnosis:
    """Finds the ranks of a torchrun and diagnoses them. `stamps`: the folder of the agent's stamps, if the job has the
    agent. Raises UsageError if `pid` is not a torchrun of this user, or has no ranks."""
    check_agent(pid)
    ranks = ranks_of(pid)
    if not ranks:
        raise UsageError(f"pid {pid}: no ranks below it; is it still starting, or between two attempts?")
    return diagnose(ranks, 0, stamps)


def ranks_of(pid: int) -> dict[int, RankProcess]:
    """The ranks below this torchrun on this machine, by number. If there are several attempts, the ranks of the
    latest."""
    tree = ProcessTree(None)
    tree.add_root(pid)
    tree.scan()
    found = find_ranks(tree.members, (), time.monotonic())
    in_order = sorted(found.ranks.items())
    return {rank: rank_process(member, member.identity) for (_, rank), member in in_order if member.identity}
