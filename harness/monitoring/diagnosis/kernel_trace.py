"""Observes the ranks in the kernel for some seconds with bpftrace: long uninterruptible sleeps, and slow function
calls.

Reading /proc from time to time misses a rank that is stuck for a tenth of a second again and again; the tracepoints of
the scheduler do not. This needs root, bpftrace, a kernel with tracepoints, and 1.5 s to attach. tracefs is mounted in a
mount namespace of its own, so the machine is not changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchaos.harness.host import processes
from torchaos.harness.interfaces import UsageError

LONG_S = 0.05
_ATTACH_S = 20.0
_MOUNT = """mount -t tracefs tracefs /sys/kernel/tracing && mount -t debugfs debugfs /sys/kernel/debug
exec bpftrace -q -f json -e "$0"
"""
# `prev_state` is a field of Linux's sched_switch: bit 1 is TASK_UNINTERRUPTIBLE.
_SLEEPS = """
BEGIN { printf("ready\\n"); }
tracepoint:sched:sched_switch /args->prev_state & 2/ { @asleep[args->prev_pid] = nsecs; }
tracepoint:sched:sched_switch /@asleep[args->next_pid]/ {
  if (nsecs - @asleep[args->next_pid] >= LONG) {
    printf("asleep %d %lu\\n", args->next_pid, nsecs - @asleep[args->next_pid]);
  }
  delete(@asleep[args->next_pid]);
}
END { printf("now 0 %lu\\n", nsecs); }
"""
_LIMIT = "interval:s:SECONDS { exit(); }\n"  # if nobody is left who ends it
_CALLS = """
uprobe:FUNCTION { @callNUMBER[tid] = nsecs; }
uretprobe:FUNCTION /@callNUMBER[tid]/ {
  if (nsecs - @callNUMBER[tid] >= LONG) { printf("callNUMBER %d %lu\\n", tid, nsecs - @callNUMBER[tid]); }
  delete(@callNUMBER[tid]);
}
"""
_FUNCTION = re.compile(r"/[\w./+-]+:[\w.]+")


@dataclass(frozen=True)
class Wait:
    """A wait of one rank: its cause in words, and the longest and the total time in seconds."""

    rank: int
    what: str
    longest_s: float
    total_s: float

    def __str__(self) -> str:
        return f"rank {self.rank} was {self.what} for {self.longest_s:.2f} s, {self.total_s:.2f} s in all"


def missing() -> str | None:
    """The first requirement that this machine does not meet, in words. None if it meets all."""
    if os.geteuid() != 0:
        return "root"
    for name in ("bpftrace", "unshare"):
        if shutil.which(name) is None:
            return name
    return None if Path("/sys/kernel/tracing").is_dir() else "a kernel with tracepoints"


def watch(
    ranks: Mapping[int, int], seconds: float, functions: Sequence[str] = (), attached: Callable[[], None] = lambda: None
) -> list[Wait]:
    """Observes the ranks for `seconds`, and returns a Wait for each rank and each kind of wait that was longer than
    LONG_S. Of a sleep from before the observation, the time since the beginning counts.

    `ranks`: pid by rank. `functions`: PATH:SYMBOL each, in a library that the ranks have loaded. `attached`: called
    when the observation begins. Raises UsageError if this machine can't do it."""
    if (lacks := missing()) is not None:
        raise UsageError(f"looking into the kernel needs {lacks}; leave --kernel out, or see `torchaos doctor`")
    for function in functions:
        if not _FUNCTION.fullmatch(function):
            raise UsageError(f"--function {function}: write the path of the library, a colon and the symbol")
    rank_of, asleep = _threads(ranks), _Asleep(ranks)

    def begin() -> None:
        asleep.begin()
        attached()

    limit = _LIMIT.replace("SECONDS", str(int(seconds + _ATTACH_S)))
    seen = _run(_program(functions) + limit, seconds, begin, asleep.end)
    seen += asleep.without({thread for what, thread, _taken_s in seen if what == "asleep"})
    names = {"asleep": "in an uninterruptible sleep"}
    names |= {f"call{number}": f"in {function.rpartition(':')[2]}" for number, function in enumerate(functions)}
    rank_of |= _threads(ranks)
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for what, thread, taken_s in seen:
        if thread in rank_of and what in names and taken_s >= LONG_S:
            times[rank_of[thread], what].append(taken_s)
    return [Wait(rank, names[what], max(taken), sum(taken)) for (rank, what), taken in sorted(times.items())]


class _Asleep:
    """The threads that were asleep both when the observation began and when it ended. The tracepoint of a switch shows
    only sleeps that begin later: a thread of which it shows none has not woken in between."""

    def __init__(self, ranks: Mapping[int, int]) -> None:
        self._ranks = ranks
        self._threads = set[int]()
        self._since_s = self._until_s = 0.0

    def begin(self) -> None:
        self._threads, self._since_s = self._now(), time.monotonic()

    def end(self) -> None:
        self._until_s = time.monotonic()
        self._threads &= self._now()

    def without(self, others: set[int]) -> list[tuple[str, int, float]]:
        taken_s = self._until_s - self._since_s
        return [("asleep", thread, taken_s) for thread in self._threads - others]

    def _now(self) -> set[int]:
        return {thread for thread in _threads(self._ranks) if (found := processes.stat(thread)) and found.state == "D"}


def _program(functions: Sequence[str]) -> str:
    calls = [_CALLS.replace("FUNCTION", function).replace("NUMBER", str(n)) for n, function in enumerate(functions)]
    return "".join([_SLEEPS, *calls]).replace("LONG", str(int(LONG_S * 1e9)))


def _threads(ranks: Mapping[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for rank, pid in ranks.items():
        tasks = Path(f"/proc/{pid}/task")
        found |= {int(task.name): rank for task in tasks.iterdir()} if tasks.exists() else {}
    return found


def _run(
    program: str, seconds: float, begin: Callable[[], None], end: Callable[[], None]
) -> list[tuple[str, int, float]]:
    """Runs a bpftrace program, and calls `begin` and `end` when the observation begins and ends. Returns (kind, thread
    id, seconds) for each wait, including short ones that have not ended."""
    command = ["unshare", "--mount", "sh", "-c", _MOUNT, program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = False
        try:
            for line in process.stdout:
                if "ready" in line:
                    ready = True
                    break
            if ready:
                begin()
                try:
                    process.wait(seconds)
                except subprocess.TimeoutExpired:
                    end()
                    process.send_signal(signal.SIGINT)
            text, error = process.communicate(timeout=_ATTACH_S)
        finally:
            process.kill()
    if not ready:
        reason = next((line for line in error.splitlines()[::-1] if "RLIMIT" not in line and line.strip()), "")
        raise UsageError(f"bpftrace can't look into this kernel: {reason[:200]}")
    return _parsed(text)


def _parsed(text: str) -> list[tuple[str, int, float]]:
    found, now = [], 0
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        data = entry.get("data")
        if entry.get("type") == "printf" and len(words := str(data).split()) == 3:
            found.append((words[0], int(words[1]), int(words[2]) / 1e9))
            now = int(words[2]) if words[0] == "now" else now
        elif entry.get("type") == "map" and isinstance(data, dict):
            for name, since in data.items():
                under_way = since.items() if isinstance(since, dict) else ()
                found += [(name.lstrip("@"), int(thread), (now - at) / 1e9) for thread, at in under_way]
    return found
