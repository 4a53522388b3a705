"""Cgroups that torchaos makes to give processes less CPU time or memory (versions 1 and 2), or to freeze them (version
1).

Only these cgroups are changed; processes are moved into them and back. The formats are from the documentation of Linux:
Documentation/admin-guide/cgroup-v1/cgroups.rst and memory.rst, scheduler/sched-bwc.rst, cgroup-v2.rst."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from torchaos.harness.host import processes
from torchaos.harness.rollback.file_handles import Touches

PERIOD_US = 10_000  # short, so that a rank is throttled for a few milliseconds at a time
_PREFIX = "torchaos-"
_EMPTY_S = 1.0  # seconds for which a process that was just moved out may still keep the group busy

Group = TypeVar("Group", bound="CpuCgroup")


@dataclass(frozen=True)
class CpuCgroup:
    """A CPU group at `path` that torchaos made, below or beside `home`, the group in which its processes were before.
    Undo moves the processes back and removes the group."""

    kind: ClassVar[str] = "cpu_cgroup"
    controller: ClassVar[str] = "cpu"
    path: str
    home: str

    @classmethod
    def of(cls: type[Group], pid: int) -> Group:
        """The torchaos group in which a process is now. Raises ValueError if the process is in no such group, OSError
        if the process or the group is gone."""
        home, _version = home_of(pid, cls.controller)
        return cls(str(home), str(home.parent))

    @classmethod
    def to_make(cls: type[Group], pid: int, name: str) -> Group:
        """The group that `throttle` or `starve` will make for a process. With version 1 it is a child of the process's
        own group. With version 2 it is a sibling, because a group with processes can't have child groups. Raises
        OSError or ValueError if there is none that may be used."""
        home, version = home_of(pid, cls.controller)
        parent = home if version == 1 else home.parent
        if version == 2 and cls.controller not in (parent / "cgroup.subtree_control").read_text().split():
            problem = f"{parent} does not control {cls.controller} in its cgroups"
            raise ValueError(f"{problem}; enable it in its cgroup.subtree_control")
        return cls(str(parent / _named(name, pid)), str(home))

    def __post_init__(self) -> None:
        if not Path(self.path).name.startswith(_PREFIX) or ".." in Path(self.path).parts:
            raise ValueError(f"{self.path} is not a cgroup of torchaos")

    def touches(self) -> Touches:
        return Touches(marked=self.path)

    def undo(self) -> None:
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

    def is_undone(self) -> bool:
        return not Path(self.path).exists()

    def throttled(self) -> tuple[int, float]:
        """How often the processes of the group were throttled so far, and for how many seconds. Zeros if the group is
        gone."""
        try:
            lines = (Path(self.path) / "cpu.stat").read_text().splitlines()
        except OSError:
            return 0, 0.0
        stats = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
        seconds = stats.get("throttled_time", 0) / 1e9 + stats.get("throttled_usec", 0) / 1e6  # v1, v2
        return stats.get("nr_throttled", 0), seconds


@dataclass(frozen=True)
class FreezerCgroup(CpuCgroup):
    """A freezer group (version 1) that torchaos made below `home`. Undo thaws the group, moves its processes back and
    removes the group."""

    kind: ClassVar[str] = "freezer_cgroup"

    def undo(self) -> None:
        state = Path(self.path) / "freezer.state"
        if state.exists():
            state.write_text("THAWED")
        super().undo()


@dataclass(frozen=True)
class MemoryCgroup(CpuCgroup):
    """A group of the memory controller that torchaos made. Its limit is removed together with the group."""

    kind: ClassVar[str] = "memory_cgroup"
    controller: ClassVar[str] = "memory"

    def killed(self) -> int:
        """How many processes the kernel has killed because of the group's memory limit. 0 if the group is gone."""
        for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
            try:
                lines = (Path(self.path) / name).read_text().splitlines()
            except OSError:
                continue
            return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return 0


def freezer_for(pid: int, name: str) -> FreezerCgroup:
    """The freezer group that `freeze` will make, below the present group of the process. Raises OSError or ValueError
    if there is none that may be used."""
    mount = _mounted("cgroup", "freezer")
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        if "freezer" in controllers.split(","):
            home = mount / path.lstrip("/")
            return FreezerCgroup(str(home / _named(name, pid)), str(home))
    raise ValueError(f"pid {pid} is in no freezer cgroup")


def freeze(group: FreezerCgroup, pid: int) -> None:
    """Makes the group, moves the process into it and freezes it. A frozen process is in an uninterruptible sleep, which
    SIGKILL does not end."""
    path = Path(group.path)
    path.mkdir()
    _move(pid, path)
    (path / "freezer.state").write_text("FROZEN")


def home_of(pid: int, controller: str) -> tuple[Path, int]:
    """The cgroup that limits the CPU time or memory of a process, and its version (1 or 2). Raises OSError or
    ValueError if there is none that may be used."""
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


def _named(name: str, pid: int) -> str:
    """A name for a new group. It has the pid and the start time of the process, because containers may share a
    hierarchy, and the same pid may exist in several containers."""
    info = processes.stat(pid)
    if info is None:
        raise ValueError(f"pid {pid} is gone")
    return f"{_PREFIX}{name}-{pid}-{info.ticks}"


def throttle(group: CpuCgroup, pid: int, cpus: float) -> None:
    """Makes the group and moves the process into it. The process then gets `cpus` CPUs on average."""
    path, quota = Path(group.path), max(1000, round(cpus * PERIOD_US))
    path.mkdir()
    if (path / "cpu.max").exists():
        (path / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    else:
        (path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (path / "cpu.cfs_quota_us").write_text(str(quota))
    _move(pid, path)


def starve(group: MemoryCgroup, pid: int, spare: int) -> None:
    """Makes the group and moves the process into it. The kernel kills the process when it has allocated `spare` more
    bytes. Memory from before the move still counts for its earlier group (memory.move_charge_at_immigrate is 0 in a new
    group)."""
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
