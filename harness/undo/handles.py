"""The closed set of things that can be taken back. A handle is data: a frozen dataclass that goes through JSON.

`restore` sets the known-good state, may be called any number of times, and leaves alone what is not the thing that it
names; it raises ValueError or OSError with a sentence where it can't. `restored` verifies.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Mapping

from torchaos.harness.agent.page import ControlPage
from torchaos.harness.machine import proc
from torchaos.harness.undo.cgroup import CpuCgroup, FreezerCgroup, MemoryCgroup
from torchaos.harness.undo.containers import Container, Containers, DockerImage, DockerNetwork
from torchaos.harness.undo.file import File
from torchaos.harness.undo.mount import Mount
from torchaos.harness.undo.network import LinkUp, Names, NftTable, Qdisc, QueueRule
from torchaos.harness.undo.proxy import Toxic
from torchaos.harness.undo.touches import Touches

if TYPE_CHECKING:
    from torchaos.harness.contracts import Handle

END_S = 30.0  # a rank that gives back pinned or GPU memory takes its time to die


@dataclass(frozen=True)
class Process:
    """One process, by pid and start time. `resume`: it runs on when it was stopped. `end`: it is killed."""

    kind: ClassVar[str] = "process"
    pid: int
    start_ticks: int
    action: Literal["resume", "end"]
    boot: str = ""  # start times are those of one boot; empty: of this one

    def __post_init__(self) -> None:
        if self.action not in ("resume", "end") or self.pid <= 1:
            raise ValueError(f"process {self.pid} can't be guarded with the action {self.action!r}")

    def touches(self) -> Touches:
        return Touches(process=(self.pid, self.start_ticks))

    @classmethod
    def of(cls, pid: int, action: Literal["resume", "end"]) -> Process:
        """Of a living process. Raises ProcessLookupError where there is none."""
        found = proc.stat(pid)
        if found is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(pid, found.ticks, action, proc.boot_id())

    def restore(self) -> None:
        if self._of_earlier_boot():
            return
        if self.action == "end":
            self._end()
            return
        with proc.hold(self.pid, self.start_ticks) as fd:
            if fd is not None:
                # Also when it is not stopped: SIGCONT takes back a stop that is still on its way.
                signal.pidfd_send_signal(fd, signal.SIGCONT)
                deadline = time.monotonic() + 1.0
                while not self.restored() and time.monotonic() < deadline:
                    time.sleep(0.001)

    def restored(self) -> bool:
        if self._of_earlier_boot():
            return True
        with proc.hold(self.pid, self.start_ticks) as fd:
            if fd is None:
                return True
            found = proc.stat(self.pid)
            return self.action == "resume" and (found is None or found.state != "T")

    def _end(self) -> None:
        if proc.is_own(self.pid):
            raise ValueError(f"process {self.pid} is the one that heals, or an ancestor of it")
        if proc.kill({self.pid: self.start_ticks}, time.monotonic() + END_S):
            raise TimeoutError(f"process {self.pid} can't be killed, or not within {END_S:.0f} s")

    def _of_earlier_boot(self) -> bool:
        return bool(self.boot) and bool(now := proc.boot_id()) and now != self.boot


@dataclass(frozen=True)
class JobProcesses:
    """Every process of a job that we launched, known by the mark in its environment: all are killed, wherever they
    hang in the process tree, stopped or not. For a job that we attached to there is no such handle."""

    kind: ClassVar[str] = "job_processes"
    run_id: str

    def __post_init__(self) -> None:
        if not self.run_id:
            raise ValueError("a job's processes can't be told without its run id")

    def touches(self) -> Touches:
        return Touches(run_id=self.run_id)

    def restore(self) -> None:
        deadline = time.monotonic() + END_S
        while members := proc.family(self.run_id):  # again, for those born meanwhile
            left = proc.kill(members, deadline)
            if left or time.monotonic() > deadline:
                pids = sorted(left or members)
                raise TimeoutError(f"processes of the job can't be killed, or not within {END_S:.0f} s: {pids}")

    def restored(self) -> bool:
        return not proc.family(self.run_id)


@dataclass(frozen=True)
class PageSlot:
    """A fault's control page: no rank stays held, and the fault doesn't fire again.

    A page that is not there counts as healed only when no process has the deleted one mapped: then it was never
    made, or went with its run, and no rank can be waiting at it.
    """

    kind: ClassVar[str] = "page_slot"
    path: str
    GO_ON: ClassVar[int] = 2**62  # releases every firing there will ever be

    def touches(self) -> Touches:
        return Touches(path=self.path, own=self.path)

    def restore(self) -> None:
        page = self._open()
        if page is None:
            return
        try:
            page.write(ControlPage.ALLOWED, page.read(ControlPage.FIRED))
            page.write(ControlPage.GO, self.GO_ON)
        finally:
            page.close()

    def restored(self) -> bool:
        page = self._open()
        if page is None:
            return not proc.maps_deleted(self.path)
        try:
            done = page.read(ControlPage.ALLOWED) <= page.read(ControlPage.FIRED)
            return done and page.read(ControlPage.GO) >= self.GO_ON
        finally:
            page.close()

    def _open(self) -> ControlPage | None:
        """None when it is not there, or was never finished: its maker died over it, and no agent takes it for one."""
        try:
            # Only looked at first, and without waiting for a fifo's writer: a damaged log may name anything.
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            found = file.read(ControlPage.SIZE + 1)
        if len(found) == ControlPage.SIZE and found[:8] == ControlPage.MARK:
            return ControlPage(self.path)
        if not any(found[:8]):
            return None
        raise ValueError(f"{self.path}: not a control page, which has {ControlPage.SIZE} bytes and a mark of its own")


def check_within(handle: Handle, folders: Collection[Path]) -> None:
    """Raises ValueError where a page, a file of names or a saved copy is in none of the run's own folders: the log that
    says so was damaged, or is another run's."""
    said = handle.touches().own
    if said is None:
        return
    found = Path(said)
    place = found.parent.resolve() / found.name
    if not any(place.is_relative_to(one) for folder in folders for one in (folder, folder.resolve())):
        raise ValueError(f"{said}: it is outside the run directory, so it is left alone")


_ALL: tuple[type[Handle], ...] = (
    Process,
    JobProcesses,
    File,
    PageSlot,
    Mount,
    CpuCgroup,
    FreezerCgroup,
    MemoryCgroup,
    NftTable,
    LinkUp,
    Qdisc,
    QueueRule,
    Names,
    Containers,
    DockerNetwork,
    DockerImage,
    Container,
    Toxic,
)
REGISTRY: Mapping[str, type[Handle]] = {cls.kind: cls for cls in _ALL}


def to_json(handle: Handle) -> dict[str, Any]:
    """Raises ValueError where the handle is none of the registry's."""
    if REGISTRY.get(handle.kind) is not type(handle):
        raise ValueError(f"{type(handle).__name__} is not one of the handles: {', '.join(sorted(REGISTRY))}")
    return {"kind": handle.kind, **asdict(handle)}  # type: ignore[call-overload]


def from_json(raw: Mapping[str, Any]) -> Handle:
    """Raises ValueError where it is not a handle of this version."""
    fields = dict(raw)
    kind = fields.pop("kind", None)
    if kind not in REGISTRY:
        raise ValueError(f"{kind!r} is not a kind of handle that this version of torchaos knows")
    try:
        return REGISTRY[kind](**fields)
    except TypeError as error:
        raise ValueError(f"not a {kind} handle: {error}") from error
