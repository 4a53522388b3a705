"""Reads the Python stacks of the ranks, with py-spy or as their agents write them at a signal, and finds the ranks
whose stacks differ from those of the others."""

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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchaos.harness.agent import startup
from torchaos.harness.agent.startup import SIGNAL
from torchaos.harness.host import processes
from torchaos.harness.interfaces import RankProcess

# Reads the Python stacks of the ranks with py-spy, and finds the ranks whose stacks differ from those of the others.

_TIMEOUT_S = 5.0
_AGENT = f"{Path(startup.__file__).parent}/"
_STDLIB = sysconfig.get_paths()["stdlib"].rpartition("/")[2]  # such as python3.11; the job's Python may be another
_COLLECTIVES = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")


@dataclass(frozen=True)
class Frame:
    function: str
    file: str
    line: int

    @property
    def is_of_agent(self) -> bool:
        """Whether it is of torchaos's agent, whose hooks call what the job called."""
        return self.file.startswith(_AGENT) or "/torchaos/harness/agent/" in self.file

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Stack:
    """The main thread's frames, the innermost first."""

    pid: int
    frames: tuple[Frame, ...]

    @property
    def at(self) -> Frame | None:
        """The innermost frame outside Python's standard library. If there is none, the innermost frame of all."""
        own = [frame for frame in self.frames if not _is_stdlib(frame.file)]
        return own[0] if own else (self.frames[0] if self.frames else None)

    @property
    def user(self) -> Frame | None:
        """The innermost frame outside the standard library, installed packages and our agent; None if there is none."""
        own = [
            frame for frame in self.frames
            if not _is_stdlib(frame.file) and "site-packages" not in frame.file and not frame.is_of_agent
        ]  # fmt: skip
        return own[0] if own else None

    @property
    def place(self) -> str:
        """The most useful frame for the user, in words."""
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
    while their stacks are read, so a stack may show two states that are microseconds apart."""
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
    """The stack of the main thread in py-spy's JSON; None if it can't be read."""
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

    If some ranks wait in collectives, the result is the ranks that do not. Otherwise it is the few ranks whose stack is
    not that of the majority; a rank may wait for its GPU anywhere. If no stack has a majority, as in a pipeline, each
    process group in `groups` is examined alone, and the first result is returned."""
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


# The stacks of ranks that their agents write at a signal (`agent/startup.py`), for ranks that py-spy can't read. It is
# used only when the job is about to be ended.

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_WAIT_S, _LOOK_S = 3.0, 0.05  # seconds; a write is over when the file did not grow between two looks


def ask(ranks: Mapping[int, RankProcess], folder: Path) -> dict[int, Stack]:
    """The stacks of these ranks, by rank; without the ranks that don't answer."""
    asked = {}
    for rank, process in ranks.items():
        files = [path for path in folder.glob(f"rank{rank}-a{process.attempt}-p*.txt") if path.is_file()]
        if files and _handles_it(process.pid):
            path = max(files, key=lambda file: file.stat().st_mtime)
            before = path.stat().st_size
            with suppress(OSError), processes.hold(process.pid, process.start_ticks) as fd:
                if fd is not None:
                    signal.pidfd_send_signal(fd, SIGNAL)
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
    """Whether the process has a handler for the signal; see SigCgt in proc_pid_status(5). Otherwise it would die."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False
