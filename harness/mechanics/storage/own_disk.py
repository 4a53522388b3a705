"""Puts the checkpoint folder on a file system of its own for one run: a tmpfs of `job.checkpoints.size` bytes.

Its files are in memory. They are copied out before it is unmounted, and the copy then replaces the folder. If the
harness is killed, the files are lost."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchaos.harness.contracts import ChaosError
from torchaos.harness.undo.mount import Mount, mounts

_NO_SUID_NO_DEV = 2 | 4  # MS_NOSUID | MS_NODEV of mount(2)
_FSOPEN, _CLOSE_ON_EXEC = 430, 1  # fsopen(2): the same number on every architecture


@dataclass(frozen=True)
class OwnDisk:
    """The disk of one run, with `size` bytes. `way_back` is the handle of the mount, and must be guarded before
    `mount`."""

    folder: Path
    size: int
    way_back: Mount

    @classmethod
    def of(cls, folder: Path, size: int, run_id: str) -> OwnDisk:
        """Makes the folder, but does not mount anything yet. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder.resolve(), size, Mount.of(folder, f"torchaos-{run_id}"))

    def mount(self) -> None:
        """Mount the tmpfs. Raises ChaosError."""
        libc, options = ctypes.CDLL(None, use_errno=True), f"size={self.size},mode=755".encode()
        target = os.fsencode(self.folder)
        if libc.mount(os.fsencode(self.way_back.tag), target, b"tmpfs", ctypes.c_ulong(_NO_SUID_NO_DEV), options) != 0:
            why = os.strerror(ctypes.get_errno())
            raise ChaosError(f"{self.folder}: no tmpfs can be mounted there: {why}; leave job.checkpoints.size out")

    def give_back(self, unmount: Callable[[], None], keep: bool) -> str | None:
        """Unmounts the disk. With `keep`, its files are first copied out, and the copy replaces the folder. Returns a
        sentence about lost files, or None."""
        if self.way_back.restored():
            return f"{self.folder} was unmounted before its files were copied out; they are gone"
        kept, lost = self.folder.with_name(f".{self.folder.name}.kept"), None
        try:
            if keep:
                shutil.copytree(self.folder, kept, symlinks=True)
            elif any(self.folder.iterdir()):
                lost = f"there was no time to copy the files in {self.folder}; they are lost"
        except OSError as error:  # shutil.Error too, which means that some files were copied and some were not
            lost = f"some files in {self.folder} could not be copied out, and are lost: {error}"
        unmount()
        try:
            if kept.exists():
                kept.rename(self.folder)  # the folder is empty: no process saw it before it was covered
        except OSError as error:
            lost = f"the files of {self.folder} are in {kept} now: {error.strerror}"
        return lost


def is_own_disk(folder: Path) -> bool:
    """Whether a write to this folder fills a disk that torchaos made, and not a disk of the machine."""
    here = [mount for mount in mounts() if mount.target == str(folder.resolve())]
    return bool(here) and here[-1].type == "tmpfs" and here[-1].source.startswith("torchaos-")


def room(folder: Path) -> tuple[int, int]:
    """The free bytes and all bytes of the file system with this folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def may_mount() -> bool:
    """Whether this process may mount a tmpfs: as root, or in a user namespace with its own mounts."""
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(_FSOPEN, b"tmpfs", _CLOSE_ON_EXEC)
    if descriptor >= 0:
        os.close(descriptor)
    return bool(descriptor >= 0)


def memory_left() -> int:
    """Bytes that can be allocated without swapping: MemAvailable of proc(5)."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
