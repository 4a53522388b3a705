"""Records, at the end of a job, facts that the clean-up would destroy.

`of_run` reads the diagnosis that another tool has written. `look` records what the ranks do when the run is about to
end the job. `Leftovers` records what a job leaves behind when its command has ended: processes, their listening ports,
shared memory, GPU memory.

Processes that are still ending, and shared memory that is still being removed, get GRACE_S seconds. An entry in
/dev/shm counts as the job's if a process of the job was seen to map or open it, or if its name contains the pid of such
a process. If a process of another job still uses the entry, it does not count as this job's."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from torchaos.harness.host.gpu_devices import held_by
from torchaos.harness.interfaces import Emit, Need, RankProcess
from torchaos.harness.monitoring.diagnosis import live_job
from torchaos.harness.monitoring.diagnosis.live_job import Stack
from torchaos.harness.monitoring.diagnosis.wait_graph import ranges
from torchaos.harness.monitoring.observers.resource_use import IDLE, Use
from torchaos.harness.monitoring.probes.rank_probe import Sampling
from torchaos.harness.protocol import collective_stamps as stamped
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir

_MOST_BYTES = 1 << 20


def of_run(plan: Plan, folder: RunDir) -> dict[str, Any] | None:
    """The report of a run, as `read` returns it. None if no assertion names a report."""
    paths = [str(assertion.params["report"]) for assertion in plan.asserts if assertion.params.get("report")]
    return read(Path(paths[0].replace("{run}", str(folder.job)))) if paths else None


def read(path: Path) -> dict[str, Any]:
    """The report in a file: {"culprits": list of ranks}, or {"error": why it can't be used}."""
    try:
        with open(path, "rb") as file:
            raw = json.loads(file.read(_MOST_BYTES))
    except OSError as error:
        return {"error": f"it can't be read: {error.strerror}"}
    except (ValueError, RecursionError):
        return {"error": "it is not JSON (or longer than 1 MiB)"}
    named = raw.get("culprits") if isinstance(raw, dict) else None
    if not isinstance(named, list) or not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in named):
        return {"error": "it has no `culprits`, a list of ranks"}
    return {"culprits": named}


_APART_S = 1.0  # seconds between the two looks
_MOST = 16  # frames of a stack that are kept
_PARTS = {"torch/utils/data/": "the data loader", "torch/autograd/": "backward"}
_WRAPPERS = frozenset({"wrapper", "_fn", "decorate_context", "wrapped"})
_STATES = {"T": "is stopped", "t": "is stopped", "D": "is asleep in the kernel"}


def look(ranks: Mapping[int, RankProcess], folder: Path | None) -> dict[str, Any]:
    """The payload of the event: what each rank does, and the diagnosis. `folder`: the folder of the agents; None if the
    job has no agents."""
    uses, first, last = {rank: Use() for rank in ranks}, dict[int, Stack](), dict[int, Stack]()
    for number in range(2):
        if number:
            time.sleep(_APART_S)
        for rank, use in uses.items():
            use.look(ranks[rank].pid, time.monotonic())
        first, last = last, _stacks(ranks, folder)
    found = live_job.diagnose(ranks, _world(ranks), folder and folder / "stamps", hangs=True, seen=last)
    if unread := sorted(ranks.keys() - last.keys()):
        found.problems.append(f"the stacks of {ranges(unread)} could not be had, neither by py-spy nor by the agent")
    if not ranks:
        found.problems.append("no rank was alive on this machine")
    open_ = _open(folder / "stamps", ranks) if folder else {}
    told = [
        _of_rank(rank, uses[rank], first.get(rank), last.get(rank), open_.get(rank)) for rank in sorted(ranks)
    ]  # fmt: skip
    return {"ranks": told, **found.to_json()}


def _stacks(ranks: Mapping[int, RankProcess], folder: Path | None) -> dict[int, Stack]:
    """The stacks by rank. py-spy reads them, because that does not disturb a rank; the agents write those that py-spy
    can't read."""
    py_spy = live_job.find_py_spy()
    by_pid = live_job.sample([process.pid for process in ranks.values()], py_spy) if py_spy else {}
    found = {rank: by_pid[process.pid] for rank, process in ranks.items() if process.pid in by_pid}
    if folder:
        found |= live_job.ask({rank: ranks[rank] for rank in ranks.keys() - found.keys()}, folder / "stacks")
    return found


def _world(ranks: Mapping[int, RankProcess]) -> int:
    return max((process.world_size for process in ranks.values()), default=0)


def _open(folder: Path, ranks: Mapping[int, RankProcess]) -> dict[int, str]:
    """The collective in which each rank is, in words."""
    found = {}
    for calls in stamped.read_folder(folder) if folder.is_dir() else ():
        under_way = [call for call in calls if call.open and not call.thread]
        if under_way and (process := ranks.get(under_way[0].rank)) and process.attempt == under_way[0].attempt:
            call = next((call for call in under_way if call.returned_mono_s is None), under_way[0])
            found[call.rank] = call.name
    return found


def _of_rank(rank: int, use: Use, first: Stack | None, last: Stack | None, collective: str | None) -> dict[str, Any]:
    waits = use.state in _STATES or (use.whole and use.cores <= IDLE and (first is None or first == last))
    verb = _STATES.get(use.state) or ("waits" if waits else "is busy")
    return {
        "rank": rank, "waits": waits, "verb": verb, "where": _where(last, collective),
        "cores": round(use.cores, 3) if use.whole else None,
        "stack": [str(frame) for frame in last.frames[:_MOST]] if last else [],
    }  # fmt: skip


def _where(stack: Stack | None, collective: str | None) -> str:
    """Where the rank is, in words, such as `in barrier 1 of group 1 (newest at train.py:48)`."""
    called = collective or (_called(stack) if stack else "")
    user = stack.user if stack else None
    at = f"{_name(user.file)}:{user.line}" if user else ""
    if user and not user.function.startswith("<"):
        at = f"{user.function} at {at}"
    if called:
        return f"in {called}" + (f" ({at})" if at else "")
    return f"in {at}" if at else f"at {stack.place}" if stack else ""


def _called(stack: Stack) -> str:
    """The function that the user's innermost frame called, in words. Empty if it called no Python function."""
    user = stack.user
    inner = stack.frames[: stack.frames.index(user)] if user else stack.frames
    for part, words in _PARTS.items():
        if any(part in frame.file for frame in stack.frames):
            return words
    if inner and inner[-1].file.startswith("<frozen importlib"):
        return "an import"
    names = (frame.function.rpartition(".")[2] for frame in reversed(inner) if not frame.is_of_agent)
    return next((name for name in names if name not in _WRAPPERS and not name.startswith("<")), "")


def _name(file: str) -> str:
    return file.rpartition("/")[2]


GRACE_S = 3.0
SHARED = Path("/dev/shm")
_LOOK_S = 0.1
_PERIOD_S = 0.5  # seconds between looks at the entries of SHARED that the job's processes use

Members = Callable[[], Mapping[int, int]]


class Leftovers:
    """Records the leftovers of one run, if an assertion needs them. `members`: returns the live processes of the job
    (start time by pid)."""

    def __init__(self, plan: Plan, members: Members) -> None:
        self._wanted = Need.LEFTOVERS in plan.collect and not plan.job.attached
        self._members = members
        self._before = dict(_entries()) if self._wanted else {}
        self._users = _Users(members)
        self._sampling = Sampling([self._users] if self._wanted else [], _nothing)

    def start(self) -> None:
        self._sampling.start()

    def take(self, ended: bool, given_up: Callable[[], bool]) -> dict[str, Any] | None:
        """The leftovers as JSON. None if no assertion needs them, or if the job has not `ended` by itself: then it may
        still use everything. `given_up`: returns whether to stop waiting for processes that are ending."""
        self._sampling.stop()
        if not (self._wanted and ended):
            return None
        begun = time.monotonic()
        shared = [SHARED / str(entry["name"]) for entry in self._shared_memory()]
        while (left := self._members()) or any(path.exists() for path in shared):
            if time.monotonic() > begun + GRACE_S or given_up():
                break
            time.sleep(_LOOK_S)
        return {
            "waited_s": round(time.monotonic() - begun, 3),
            "processes": [found for pid in sorted(left) if (found := _process(pid))],
            "shared_memory": list(self._shared_memory()),
            "gpu_memory": held_by(left),
        }

    def _shared_memory(self) -> Iterator[dict[str, Any]]:
        new = [name for name, identity in _entries() if self._before.get(name) != identity]
        own = self._users.pids | set(self._members())
        others = {path for pid in psutil.pids() if new and pid not in own for path in _in_use(pid)}
        for name in new:
            path = SHARED / name
            if str(path) in others:
                continue
            numbers = {int(number) for number in re.findall(r"\d+", name)}
            ours = str(path) in self._users.used or bool(numbers & self._users.pids)
            with suppress(OSError):
                yield {"name": name, "bytes": path.stat().st_size, "of_job": ours}


class _Users:
    """A probe that collects the pids of the job's processes, and the files in /dev/shm that they use."""

    period_s = _PERIOD_S

    def __init__(self, members: Members) -> None:
        self._members = members
        self.used: set[str] = set()
        self.pids: set[int] = set()
        self._lock = threading.Lock()

    def sample(self, emit: Emit) -> None:
        with self._lock:
            for pid in self._members():
                self.pids.add(pid)
                self.used |= set(_in_use(pid))


def _in_use(pid: int) -> Iterator[str]:
    with suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            if f"{SHARED}/" in line:
                yield line[line.index(f"{SHARED}/") :].rstrip("\n").removesuffix(" (deleted)")
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if target.startswith(f"{SHARED}/"):
                    yield target.removesuffix(" (deleted)")


def _entries() -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields each file of this user in SHARED: its name, and its inode and change time, which distinguish it from a
    later file with the same name. Folders are left out, because they are not shared memory."""
    with suppress(OSError):
        for entry in os.scandir(SHARED):
            with suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if found.st_uid == os.geteuid() and not entry.is_dir(follow_symlinks=False):
                    yield entry.name, (found.st_ino, found.st_ctime_ns)


def _process(pid: int) -> dict[str, Any] | None:
    """A process with its command, listening ports and rank. None if it has ended by now."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            command = " ".join(process.cmdline())[:200]
            sockets = process.net_connections("inet")
            ports = sorted({socket.laddr.port for socket in sockets if socket.status == "LISTEN"})
            rank = process.environ().get("RANK")
        return {"pid": pid, "command": command, "ports": ports, "rank": rank}
    except (psutil.Error, OSError):
        return {"pid": pid, "command": "", "ports": [], "rank": None} if psutil.pid_exists(pid) else None


def _nothing(*_args: Any) -> Any:
    """Drops an event. Used in place of `emit`, because the observations of this probe go into an artifact."""
