"""The base classes of the `storage.*` injectors, and the rules (`Rules`) that storage_fs.py carries out.

`StorageFault` mounts the file system of storage_fs.py over the checkpoint folder. Only files that are opened while the
fault is on go through it. Files that the job writes in this time are stored in the folder below, and stay visible after
the fault.

`FillFault` makes a file that takes the free space. The file has the length 0, but has blocks beyond its end. So its
contents (none) are known even if the harness dies while it fills the disk, and its removal frees all of its space.

`OwnDisk` puts the checkpoint folder of one run on a tmpfs of `job.checkpoints.size` bytes. Before the tmpfs is
unmounted, its files are copied out, and the copy then replaces the folder. If the harness is killed, the files are
lost."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torchaos.harness.base_classes import Fault
from torchaos.harness.interfaces import ChaosError, Emit, Evidence, Handle, Hits, NodeSite, Target, Where
from torchaos.harness.protocol.wire import THREAD, Kind
from torchaos.harness.rollback.file_handles import File, Mount, mounts

if TYPE_CHECKING:
    from torchaos.harness.record.record import Record


READS = frozenset({"open_read", "read", "readdir", "readlink"})
LOOKS = frozenset({"getattr", "statfs"})
WRITES = frozenset({
    "open_write", "create", "write", "truncate", "mkdir", "rename", "unlink", "rmdir", "link", "symlink", "chmod",
    "chown", "utimens",
})  # fmt: skip
SYNCS = frozenset({"fsync", "fsyncdir"})
GROWS = frozenset({"create", "write", "mkdir", "symlink"})  # operations that need space


def operations(on: str) -> tuple[str, ...]:
    """The operations that the parameter `on` selects: reads, writes, both, or all (reads, writes, getattr and
    statfs)."""
    groups = {"reads": READS, "writes": WRITES | SYNCS, "both": READS | WRITES | SYNCS}
    return tuple(sorted(groups.get(on, groups["both"] | LOOKS)))


@dataclass(frozen=True)
class Rules:
    """The `operations` of the ranks `ranks` fail with `error`, take `delay_s` seconds longer, or (`stall`) hang until
    the fault is undone. `left`: bytes that can still be written; after these, only operations that need space fail.
    `rate`: bytes per second."""

    operations: tuple[str, ...]
    ranks: tuple[int, ...]
    error: str | None = None  # a name of errno
    delay_s: float = 0.0
    rate: float | None = None
    stall: bool = False
    left: int | None = None

    @property
    def number(self) -> int:
        return int(getattr(errno, self.error or "EIO"))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Rules:
        raw = json.loads(text)
        return cls(**{**raw, "operations": tuple(raw["operations"]), "ranks": tuple(raw["ranks"])})


def rank_of(pid: int) -> int | None:
    """The rank to which a thread belongs: a thread of the rank's process or of its child processes. None for all other
    threads, and for the agent's threads that read saved files, because errors there prove nothing about the job."""
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() == THREAD:
            return None
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    known = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry)
    rank = known.get(b"RANK", b"")
    return int(rank) if b"TORCHELASTIC_RUN_ID" in known and rank.isdigit() else None


_NO_SUID_NO_DEV = 2 | 4  # MS_NOSUID | MS_NODEV of mount(2)
_FSOPEN, _CLOSE_ON_EXEC = 430, 1  # the number of fsopen(2), which is the same on every architecture, and FSOPEN_CLOEXEC


@dataclass(frozen=True)
class OwnDisk:
    """The disk of one run, with `size` bytes. `undo_handle`: undoes the mount. It must be written to the undo log
    before `mount` is called."""

    folder: Path
    size: int
    undo_handle: Mount

    @classmethod
    def of(cls, folder: Path, size: int, run_id: str) -> OwnDisk:
        """Makes the folder, but does not mount anything yet. Raises OSError if the folder can't be made."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder.resolve(), size, Mount.of(folder, f"torchaos-{run_id}"))

    def mount(self) -> None:
        """Mounts the tmpfs. Raises ChaosError if that is not possible."""
        libc, options = ctypes.CDLL(None, use_errno=True), f"size={self.size},mode=755".encode()
        target, handle = os.fsencode(self.folder), self.undo_handle
        if libc.mount(os.fsencode(handle.tag), target, b"tmpfs", ctypes.c_ulong(_NO_SUID_NO_DEV), options) != 0:
            why = os.strerror(ctypes.get_errno())
            raise ChaosError(f"{self.folder}: no tmpfs can be mounted there: {why}; leave job.checkpoints.size out")

    def give_back(self, unmount: Callable[[], None], keep: bool) -> str | None:
        """Unmounts the disk. With `keep`, its files are copied out first, and the copy replaces the folder. Returns a
        sentence if files were lost, else None."""
        if self.undo_handle.is_undone():
            return f"{self.folder} was unmounted before its files were copied out; they are gone"
        kept, lost = self.folder.with_name(f".{self.folder.name}.kept"), None
        try:
            if keep:
                shutil.copytree(self.folder, kept, symlinks=True)
            elif any(self.folder.iterdir()):
                lost = f"there was no time to copy the files in {self.folder}; they are lost"
        except OSError as error:  # or shutil.Error, a subclass: some files were copied, and some were not
            lost = f"some files in {self.folder} could not be copied out, and are lost: {error}"
        unmount()
        try:
            if kept.exists():
                kept.rename(self.folder)  # the folder is empty, because it was covered before the job started
        except OSError as error:
            lost = f"the files of {self.folder} are in {kept} now: {error.strerror}"
        return lost


def is_own_disk(folder: Path) -> bool:
    """Whether this folder is on a disk that torchaos made, so that a fault may fill it."""
    here = [mount for mount in mounts() if mount.target == str(folder.resolve())]
    return bool(here) and here[-1].type == "tmpfs" and here[-1].source.startswith("torchaos-")


def room(folder: Path) -> tuple[int, int]:
    """The free bytes, and all bytes, of the file system of this folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def may_mount() -> bool:
    """Whether this process may mount a tmpfs: as root, or in a user namespace with its own mounts."""
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(_FSOPEN, b"tmpfs", _CLOSE_ON_EXEC)
    if descriptor >= 0:
        os.close(descriptor)
    return bool(descriptor >= 0)


def memory_left() -> int:
    """How many bytes can be allocated without swapping: MemAvailable of proc(5)."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))


_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of fallocate(2)
_TRIES = 100  # calls of fallocate; several are needed, because the job writes and removes files at the same time


class FillFault(Fault):
    """A file of torchaos takes all free space except `left` bytes."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"mount"})
    hits: ClassVar[Hits] = "files"
    late: ClassVar[bool] = True
    hooks: ClassVar[tuple[str, ...]] = ("checkpoints",)
    own_disk: ClassVar[bool] = True

    left: int

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        """The handle of the file. Raises ChaosError if the checkpoints are not on a file system of torchaos."""
        path = _path(site)
        return [File.of(path, path.parent, site.undo_copies, made=hashlib.sha256(b"").hexdigest())]

    def apply(self, site: NodeSite) -> None:
        """Fills the file system. Raises ChaosError if more than `left` bytes stay free, and OSError if the file can't
        be made."""
        path, libc, at = _path(site), ctypes.CDLL(None, use_errno=True), 0
        page = os.statvfs(path.parent).f_frsize
        with open(path, "xb") as file:
            for _ in range(_TRIES):
                spare = -(-(room(path.parent)[0] - self.left) // page) * page
                if spare <= 0:
                    return
                sizes = ctypes.c_int64(at), ctypes.c_int64(spare)
                if libc.fallocate(file.fileno(), _KEEP_SIZE, *sizes) == 0:
                    at += spare
                elif (code := ctypes.get_errno()) != errno.ENOSPC:  # ENOSPC: the job has just used some of the space
                    raise OSError(code, f"{path.parent} can't be filled: {os.strerror(code)}")
        raise ChaosError(f"{path.parent} could not be filled: {room(path.parent)[0]} bytes are still free")

    def probes(self, site: NodeSite) -> Sequence[Room]:
        return [Room(site.fault, _path(site).parent, self.left)]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Evidence that the file system was full, as seen from outside the job, and that a save failed meanwhile. A
        save that failed while another fault was being applied does not count."""
        full = next(record.of_fault(fault, Kind.EFFECT), None)
        over = next((event.mono_s for event in record.of_fault(fault, Kind.ROLLED_BACK)), float("inf"))
        others = [event.mono_s for event in record.of_kind(Kind.APPLYING) if event.data["fault"] != fault]
        begun: dict[tuple[object, ...], float] = {}
        for event in record.of_kind(Kind.SAVE_BEGIN, Kind.SAVE_END):
            who = event.attempt, event.rank, event.data["path"]
            if event.kind is Kind.SAVE_BEGIN:
                begun[who] = event.mono_s
                continue
            since = begun.get(who, event.mono_s)
            overlaps = full is not None and full.mono_s < event.mono_s and since < over
            if full and overlaps and not event.data.get("ok") and not any(since <= at <= event.mono_s for at in others):
                words = f"{full.data['effect']}, and rank {event.rank} could not save {Path(event.data['path']).name}"
                return Evidence.of(words, full, event)
        return None


@dataclass
class Room:
    """A probe that reports once, as soon as at most `left` bytes are free."""

    fault: str
    folder: Path
    left: int
    period_s: float = 0.05
    _reported: bool = False

    def sample(self, emit: Emit) -> None:
        free, size = room(self.folder)
        if free <= self.left and not self._reported:
            self._reported = True
            effect = f"{free} of the {size} bytes of the checkpoints' file system were free"
            emit(Kind.EFFECT, {"fault": self.fault, "what": "room", "effect": effect, "free": free})


def _path(site: NodeSite) -> Path:
    if site.checkpoints is None or not is_own_disk(site.checkpoints):
        raise ChaosError("the checkpoints have no file system of their own to fill; write job.checkpoints.size")
    return site.checkpoints.resolve() / f".torchaos-ballast-{site.fault}"


Self = TypeVar("Self")
MOUNT_S = 8.0  # seconds to wait for the mount; less than the time for which a rank is held
_ON = b"on\n"


class StorageFault(Fault):
    """A fault of the file system that holds the checkpoints. It hits the ranks of the target."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"fuse"})
    late: ClassVar[bool] = True

    ranks: tuple[int, ...]

    def rules(self) -> Rules:
        raise NotImplementedError

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        return replace(self, ranks=target.ranks)  # type: ignore[type-var]

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        """The handles of the mount and of the switch, a file that turns the failures on. Undo first removes the switch,
        and then unmounts the folder, even while it is in use."""
        folder = _folder(site)
        switch = File.of(_switch(site), site.undo_copies, site.undo_copies, hashlib.sha256(_ON).hexdigest())
        return [Mount.of(folder, _tag(site)), switch]

    def apply(self, site: NodeSite) -> None:
        """Mounts the file system. Raises ChaosError if that is not possible."""
        folder, log = _folder(site), _log(site)
        _switch(site).write_bytes(_ON)
        module = f"{__package__}.storage_fs"
        argv = [sys.executable, "-m", module, str(folder), _tag(site), str(_switch(site)), str(log)]
        with open(log.with_suffix(".out"), "wb") as output:
            server = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd="/", start_new_session=True
            )
        assert server.stdin is not None
        server.stdin.write(self.rules().to_json().encode())
        server.stdin.close()
        end = time.monotonic() + MOUNT_S
        while not any(mount.source == _tag(site) for mount in mounts()):
            if server.poll() is not None or time.monotonic() > end:
                lines = log.with_suffix(".out").read_text(errors="replace").strip().splitlines()
                raise ChaosError(
                    f"{folder} could not be covered by FUSE: {lines[-1] if lines else 'no reason was given'}"
                )
            time.sleep(0.005)

    def probes(self, site: NodeSite) -> Sequence[FailedOperations]:
        return [FailedOperations(site.fault, _log(site))]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Evidence that a target rank got an error or had to wait. The witness is the file system, which runs outside
        the rank. One target rank is enough: while it waits, the other ranks may not begin their operations."""
        seen = [event for event in record.of_fault(fault, Kind.EFFECT) if event.data.get("what") == "spoilt"]
        last = {event.data["rank"]: event for event in seen}
        if not last:
            return None
        effects = "; ".join(str(event.data["effect"]) for _rank, event in sorted(last.items()))
        return Evidence.of(effects, *last.values())


@dataclass
class FailedOperations:
    """A probe that reads the log of storage_fs.py, and reports the errors and delays of each rank."""

    fault: str
    log: Path
    period_s: float = 0.2
    _offset: int = 0
    _counts: dict[int, Counter[str]] = field(default_factory=dict)

    def sample(self, emit: Emit) -> None:
        new: set[int] = set()
        for line in self._lines():
            rank = int(line["rank"])
            new.add(rank)
            effect = f"{line['what']} at {line['operation'].replace('_', ' for ')}"
            self._counts.setdefault(rank, Counter())[effect] += 1
        for rank in sorted(new):
            gifts = ", ".join(f"{count} × {effect}" for effect, count in self._counts[rank].most_common(4))
            data = {"fault": self.fault, "what": "spoilt", "rank": rank, "effect": f"rank {rank} was given {gifts}"}
            emit(Kind.EFFECT, data)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            with open(self.log, "rb") as file:
                file.seek(self._offset)
                whole, newline, _torn = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


def _folder(site: NodeSite) -> Path:
    folder = site.checkpoints
    if folder is None:
        raise ChaosError("the scenario does not give the folder of the checkpoints; write job.checkpoints.path")
    if not folder.is_dir():
        raise ChaosError(f"{folder}: there is no such folder yet, so nothing can be mounted over it")
    return folder.resolve()


def _tag(site: NodeSite) -> str:
    """The name of the mount, made from the run's folder and the fault, so that no other mount has it."""
    return f"torchaos-{site.undo_copies.resolve().parent.name}-{site.fault}".replace(",", "_")


def _switch(site: NodeSite) -> Path:
    return site.undo_copies.resolve() / f"{site.fault}.on"


def _log(site: NodeSite) -> Path:
    return site.undo_copies.resolve() / f"{site.fault}.log"
