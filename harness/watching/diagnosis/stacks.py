"""What the ranks are doing, by their Python stacks (py-spy), and which of them do something else than the others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 5.0
_STDLIB = sysconfig.get_paths()["stdlib"].rpartition("/")[2]  # python3.11: the job's Python may lie elsewhere
_COLLECTIVES = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")


@dataclass(frozen=True)
class Frame:
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Stack:
    """The main thread's frames, the innermost first."""

    pid: int
    frames: tuple[Frame, ...]

    @property
    def at(self) -> Frame | None:
        """The innermost frame that is not of Python's own library."""
        own = [one for one in self.frames if not _is_stdlib(one.file)]
        return own[0] if own else (self.frames[0] if self.frames else None)

    @property
    def user(self) -> Frame | None:
        """The innermost frame of code that is neither Python's nor an installed package's."""
        own = [one for one in self.frames if not _is_stdlib(one.file) and "site-packages" not in one.file]
        return own[0] if own else None

    @property
    def place(self) -> str:
        return str(self.user or self.at or "no Python code")

    @property
    def waits_for_others(self) -> bool:
        """It is in torch's code for collectives, or in a backward, whose hooks call them."""
        return self.at is not None and any(part in self.at.file for part in _COLLECTIVES)

    @property
    def kind(self) -> tuple[tuple[str, str], ...]:
        """What stacks are compared by: the functions, and not the lines."""
        return tuple((one.function, one.file) for one in self.frames)


def find_py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def sample(pids: Sequence[int], py_spy: str) -> dict[int, Stack]:
    """The stacks of these processes; those that can't be read are left out. None is stopped for it: a stack may be a
    few microseconds out of step with itself."""
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
    """Of py-spy's JSON, the thread that started first: the main thread."""
    try:
        threads = json.loads(text)
        main = next((one for one in threads if one.get("thread_name") == "MainThread"), threads[0] if threads else None)
        if main is None:
            return None
        frames = [Frame(str(one["name"]), str(one["filename"]), int(one["line"])) for one in main["frames"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Stack(pid, tuple(frames))


def outliers(stacks: Mapping[int, Stack], groups: Iterable[Sequence[int]] = ()) -> dict[int, str]:
    """By rank: those that are not where the others are, and a sentence for each. Where some wait in collectives, those
    that don't are the ones that they wait for; else (ranks wait for a GPU wherever they happen to be) the few that are
    elsewhere than most. Where there is no such majority, as in a pipeline, each of the process groups is looked at by
    itself. None where all do the same."""
    waiting = [rank for rank, stack in stacks.items() if stack.waits_for_others]
    if waiting:
        apart = [rank for rank in stacks if rank not in waiting]
        return {rank: f"it is at {stacks[rank].place}, while the others wait in collectives" for rank in apart}
    found = _few(stacks)
    for group in groups if found is None else ():
        members = {rank: stacks[rank] for rank in group if rank in stacks}
        if len(members) > 2 and (few := _few(members)):
            return few
    return found or {}


def _few(stacks: Mapping[int, Stack]) -> dict[int, str] | None:
    """Those that are elsewhere than most; None where there is no majority."""
    kinds = Counter(stack.kind for stack in stacks.values())
    (usual, many), *_ = kinds.most_common() or [((), 0)]
    if 2 * many <= len(stacks):
        return None
    most = next(stack.place for stack in stacks.values() if stack.kind == usual)
    apart = [rank for rank, stack in stacks.items() if stack.kind != usual]
    return {rank: f"it is at {stacks[rank].place}, while most are at {most}" for rank in apart}


def _is_stdlib(file: str) -> bool:
    inside = f"/{_STDLIB[:6]}3." in file if _STDLIB.startswith("python") else False
    return file.startswith("<frozen") or (inside and "site-packages" not in file) or "/" not in file
