"""Cgroups of our own: processes in them get less CPU time or memory (version 1 and 2), or are frozen (version 1).

Only a group that we made is ever written to; the processes are moved into it and back. Sources of the formats:
Documentation/admin-guide/cgroup-v1/cgroups.rst and memory.rst, scheduler/sched-bwc.rst, cgroup-v2.rst of Linux.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torchaos.harness.machine import proc
from torchaos.harness.undo.touches import Touches

PERIOD_US = 10_000  # a rank is held back for a few milliseconds at a time
_PREFIX = "torchaos-"
_EMPTY_S = 1.0  # a process that has just been moved may keep the group busy for a moment


@dataclass(frozen=True)
class CpuCgroup:
    """Our group `path`, below or beside `home`, where its processes came from: they go back, and it is removed."""

    kind: ClassVar[str] = "cpu_cgroup"
    path: str
    home: str

    def __post_init__(self) -> None:
        if not Path(self.path).name.startswith(_PREFIX) or ".." in Path(self.path).parts:
            raise ValueError(f"{self.path} is not a cgroup of torchaos")

    def touches(self) -> Touches:
        return Touches(marked=self.path)

    def restore(self) -> None:
        group, end = Path(self.path), time.monotonic() + _EMPTY_S
        while group.exists():
            for pid in _members(group):
                _move(pid, Path(self.home))
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def restored(self) -> bool:
        return not Path(self.path).exists()

    def throttled(self) -> tuple[int, float]:
        """How often its processes were held back so far, and for how many seconds; zeros where it is gone."""
        try:
            lines = (Path(self.path) / "cpu.stat").read_text().splitlines()
        except OSError:
            return 0, 0.0
        found = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
        seconds = found.get("throttled_time", 0) / 1e9 + found.get("throttled_usec", 0) / 1e6  # version 1, version 2
        return found.get("nr_throttled", 0), seconds


@dataclass(frozen=True)
class FreezerCgroup(CpuCgroup):
    """Our group of the freezer of version 1, below `home`: it is thawed, its processes go back, and it is removed."""

    kind: ClassVar[str] = "freezer_cgroup"

    def restore(self) -> None:
        state = Path(self.path) / "freezer.state"
        if state.exists():
            state.write_text("THAWED")
        super().restore()


@dataclass(frozen=True)
class MemoryCgroup(CpuCgroup):
    """Our group of the memory controller: its limit goes with it, and what its processes hold stays charged to them."""

    kind: ClassVar[str] = "memory_cgroup"

    def killed(self) -> int:
        """How many processes the kernel has killed for its limit; 0 where it is gone."""
        for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
            try:
                lines = (Path(self.path) / name).read_text().splitlines()
            except OSError:
                continue
            return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return 0


def freezer_for(pid: int, name: str) -> FreezerCgroup:
    """A group of our own below the process's. Makes nothing. Raises OSError or ValueError."""
    mount = _mounted("cgroup", "freezer")
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        if "freezer" in controllers.split(","):
            home = mount / path.lstrip("/")
            return FreezerCgroup(str(home / _named(name, pid)), str(home))
    raise ValueError(f"pid {pid} is in no freezer cgroup")


def freeze(group: FreezerCgroup, pid: int) -> None:
    """Make the group, move the process into it and freeze it: uninterruptible sleep, which SIGKILL does not end."""
    path = Path(group.path)
    path.mkdir()
    _move(pid, path)
    (path / "freezer.state").write_text("FROZEN")


def home_of(pid: int, controller: str = "cpu") -> tuple[Path, int]:
    """The cgroup that rules the CPU time or memory of a process, and the version of its hierarchy. Raises OSError or
    ValueError where there is none that we may use."""
    unified = None
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return _mounted("cgroup", controller) / path.lstrip("/"), 1
        if number == "0":
            unified = path
    if unified is None:
        raise ValueError(f"pid {pid} is in no cgroup")
    return _mounted("cgroup2", None) / unified.lstrip("/"), 2


def group_for(pid: int, name: str) -> CpuCgroup:
    """A group of our own for a process: below its own one; under version 2, where a group with processes can't have
    children, beside it. Makes nothing. Raises OSError or ValueError."""
    return CpuCgroup(*_place_for(pid, name, "cpu"))


def memory_for(pid: int, name: str) -> MemoryCgroup:
    """The same of the memory controller."""
    return MemoryCgroup(*_place_for(pid, name, "memory"))


def _place_for(pid: int, name: str, controller: str) -> tuple[str, str]:
    home, version = home_of(pid, controller)
    parent = home if version == 1 else home.parent
    if version == 2 and controller not in (parent / "cgroup.subtree_control").read_text().split():
        raise ValueError(f"{parent} rules no {controller} of its cgroups; enable it in its cgroup.subtree_control")
    return str(parent / _named(name, pid)), str(home)


def group_of(pid: int) -> CpuCgroup:
    """The group of ours that a process is in. Raises ValueError where it is in none, OSError where it is gone."""
    home, _version = home_of(pid)
    return CpuCgroup(str(home), str(home.parent))


def memory_of(pid: int) -> MemoryCgroup:
    """The same of the memory controller."""
    home, _version = home_of(pid, "memory")
    return MemoryCgroup(str(home), str(home.parent))


def _named(name: str, pid: int) -> str:
    """By pid and start time: hierarchies are shared by containers, in which pids come again."""
    found = proc.stat(pid)
    if found is None:
        raise ValueError(f"pid {pid} is gone")
    return f"{_PREFIX}{name}-{pid}-{found.ticks}"


def throttle(group: CpuCgroup, pid: int, cpus: float) -> None:
    """Make the group and move the process into it: it gets that many CPUs in the mean."""
    path, quota = Path(group.path), max(1000, round(cpus * PERIOD_US))
    path.mkdir()
    if (path / "cpu.max").exists():
        (path / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    else:
        (path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (path / "cpu.cfs_quota_us").write_text(str(quota))
    _move(pid, path)


def starve(group: MemoryCgroup, pid: int, spare: int) -> None:
    """Make the group and move the process into it: once it has taken `spare` bytes more, the kernel kills it. What it
    has by now stays charged to the group that it comes from (memory.move_charge_at_immigrate is 0 in a new one)."""
    path = Path(group.path)
    path.mkdir()
    limit = path / "memory.max"
    (limit if limit.exists() else path / "memory.limit_in_bytes").write_text(str(spare))
    swap = path / "memory.swap.max"
    if swap.exists():
        swap.write_text("0")
    _move(pid, path)


def _mounted(kind: str, option: str | None) -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _device, where, found, options, *_ = line.split()
        if found == kind and (option is None or option in options.split(",")):
            return Path(where)
    raise ValueError(f"no {kind} with {option or 'any controller'} is mounted")


def _members(group: Path) -> list[int]:
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]


def _move(pid: int, group: Path) -> None:
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except ProcessLookupError:
        return
    except OSError:
        if os.path.exists(f"/proc/{pid}"):
            raise
