"""All kinds of handles. A *handle* describes, as data, how one change is undone: a frozen dataclass that can be stored
as JSON.

`undo` undoes the change. It may be called any number of times, and changes only what the handle names. If it fails, it
raises ValueError or OSError with a sentence. `is_undone` verifies: it returns whether the change is undone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Mapping

from torchaos.harness.host import processes
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.rollback.cgroup_handles import CpuCgroup, FreezerCgroup, MemoryCgroup
from torchaos.harness.rollback.cluster_handles import (
    KubernetesAgent,
    KubernetesNode,
    KubernetesObjects,
    SlurmNodeState,
    SlurmWork,
)
from torchaos.harness.rollback.container_handles import Container, Containers, DockerImage, DockerNetwork
from torchaos.harness.rollback.file_handles import File, Mount, Touches
from torchaos.harness.rollback.network_handles import LinkUp, Names, NftTable, Qdisc, QueueRule, Toxic

if TYPE_CHECKING:
    from torchaos.harness.interfaces import Handle


@dataclass(frozen=True)
class Process:
    """A process, by pid and start time. `action` is its undo: `resume` continues a stopped process, `end` kills the
    process."""

    kind: ClassVar[str] = "process"
    pid: int
    start_ticks: int
    action: Literal["resume", "end"]
    boot: str = ""  # boot id that the start time belongs to; empty: the current one

    def __post_init__(self) -> None:
        if self.action not in ("resume", "end") or self.pid <= 1:
            raise ValueError(f"process {self.pid} can't be undone by the action {self.action!r}")

    def touches(self) -> Touches:
        return Touches(process=(self.pid, self.start_ticks))

    @classmethod
    def of(cls, pid: int, action: Literal["resume", "end"]) -> Process:
        """The handle of a living process. Raises ProcessLookupError if there is none."""
        found = processes.stat(pid)
        if found is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(pid, found.ticks, action, processes.boot_id())

    def undo(self) -> None:
        if self._of_earlier_boot():
            return
        if self.action == "end":
            self._end()
            return
        with processes.hold(self.pid, self.start_ticks) as fd:
            if fd is not None:
                # Sent also to a process that is not stopped (yet), because SIGCONT cancels a pending stop signal.
                signal.pidfd_send_signal(fd, signal.SIGCONT)
                deadline = time.monotonic() + 1.0
                while not self.is_undone() and time.monotonic() < deadline:
                    time.sleep(0.001)

    def is_undone(self) -> bool:
        if self._of_earlier_boot():
            return True
        with processes.hold(self.pid, self.start_ticks) as fd:
            if fd is None:
                return True
            found = processes.stat(self.pid)
            return self.action == "resume" and (found is None or found.state != "T")

    def _end(self) -> None:
        if processes.is_own(self.pid):
            raise ValueError(f"process {self.pid} is the process that does the undo, or an ancestor of it")
        if processes.kill({self.pid: self.start_ticks}, time.monotonic() + processes.END_S):
            raise TimeoutError(f"process {self.pid} can't be killed, or not within {processes.END_S:.0f} s")

    def _of_earlier_boot(self) -> bool:
        return bool(self.boot) and bool(now := processes.boot_id()) and now != self.boot


@dataclass(frozen=True)
class JobProcesses:
    """All processes of a job that torchaos started, found by the mark in their environment. Undo kills them, wherever
    they are in the process tree, and whether stopped or not. A job that was running before torchaos (`--attach`) has no
    such handle."""

    kind: ClassVar[str] = "job_processes"
    run_id: str

    def __post_init__(self) -> None:
        if not self.run_id:
            raise ValueError("a job's processes can't be found without its run id")

    def touches(self) -> Touches:
        return Touches(run_id=self.run_id)

    def undo(self) -> None:
        if left := processes.end(partial(processes.family, self.run_id)):
            raise TimeoutError(f"processes of the job can't be killed, or not within {processes.END_S:.0f} s: {left}")

    def is_undone(self) -> bool:
        return not processes.family(self.run_id)


@dataclass(frozen=True)
class PageSlot:
    """The control page of a fault: a file in shared memory through which the harness controls the fault in a rank. Undo
    lets a held rank go on, and keeps the fault from firing again.

    A missing page counts as undone only if no process has the deleted file mapped. Then the page was never made, or was
    removed with its run, and no rank can be waiting for it."""

    kind: ClassVar[str] = "page_slot"
    path: str
    GO_ON: ClassVar[int] = 2**62  # as the word GO: no firing holds a rank

    def touches(self) -> Touches:
        return Touches(path=self.path, own=self.path)

    def undo(self) -> None:
        page = self._open()
        if page is None:
            return
        try:
            page.write(ControlPage.ALLOWED, page.read(ControlPage.FIRED))
            page.write(ControlPage.GO, self.GO_ON)
        finally:
            page.close()

    def is_undone(self) -> bool:
        page = self._open()
        if page is None:
            return not processes.maps_deleted(self.path)
        try:
            done = page.read(ControlPage.ALLOWED) <= page.read(ControlPage.FIRED)
            return done and page.read(ControlPage.GO) >= self.GO_ON
        finally:
            page.close()

    def _open(self) -> ControlPage | None:
        """The page. None if the file is missing, or if it is incomplete because the process that made it died; no agent
        uses an incomplete page."""
        try:
            # Look at the file first, without blocking: a damaged log may name any file.
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            head = file.read(ControlPage.SIZE + 1)
        if len(head) == ControlPage.SIZE and head[:8] == ControlPage.MARK:
            return ControlPage(self.path)
        if not any(head[:8]):
            return None
        raise ValueError(f"{self.path}: not a control page, which has {ControlPage.SIZE} bytes and begins with a mark")


def check_within(handle: Handle, folders: Collection[Path]) -> None:
    """Raises ValueError if a file that only the run uses (a page, a file of names, a saved copy) is outside these
    folders of the run. Then the log is damaged, or belongs to another run."""
    own = handle.touches().own
    if own is None:
        return
    path = Path(own)
    place = path.parent.resolve() / path.name
    if not any(place.is_relative_to(root) for folder in folders for root in (folder, folder.resolve())):
        raise ValueError(f"{own}: it is outside the run directory, so it is left alone")


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
    SlurmWork,
    SlurmNodeState,
    KubernetesObjects,
    KubernetesAgent,
    KubernetesNode,
)
REGISTRY: Mapping[str, type[Handle]] = {cls.kind: cls for cls in _ALL}


def to_json(handle: Handle) -> dict[str, Any]:
    """The handle as JSON. Raises ValueError if its class is not in REGISTRY."""
    if REGISTRY.get(handle.kind) is not type(handle):
        raise ValueError(f"{type(handle).__name__} is not one of the handles: {', '.join(sorted(REGISTRY))}")
    return {"kind": handle.kind, **asdict(handle)}  # type: ignore[call-overload]


def from_json(raw: Mapping[str, Any]) -> Handle:
    """The handle that this JSON describes. Raises ValueError if this version does not know that kind of handle."""
    fields = dict(raw)
    kind = fields.pop("kind", None)
    if kind not in REGISTRY:
        raise ValueError(f"{kind!r} is not a kind of handle that this version of torchaos knows")
    try:
        return REGISTRY[kind](**fields)
    except TypeError as error:
        raise ValueError(f"not a {kind} handle: {error}") from error
