"""A file that holds room in a file system, and nothing else: it is empty, with blocks beyond its end. So it is known
again by its contents, however far whoever filled it has come, and its removal gives back all of its room.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from pathlib import Path

from torchaos.harness.contracts import ChaosError, Site
from torchaos.harness.storage.own_disk import is_own_disk, room
from torchaos.harness.undo.file import File

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of fallocate(2)
_TRIES = 100  # the job writes and removes meanwhile


def way_back(site: Site) -> File:
    """Raises ChaosError where what would be filled is no file system of ours."""
    path = _path(site)
    return File.of(path, path.parent, site.undo_copies, made=hashlib.sha256(b"").hexdigest())


def fill(site: Site, left: int) -> None:
    """Until at most `left` bytes are free. Raises ChaosError where it does not come to that, OSError as usual."""
    path, libc, at = _path(site), ctypes.CDLL(None, use_errno=True), 0
    page = os.statvfs(path.parent).f_frsize
    with open(path, "xb") as file:
        for _ in range(_TRIES):
            spare = -(-(room(path.parent)[0] - left) // page) * page
            if spare <= 0:
                return
            sizes = ctypes.c_int64(at), ctypes.c_int64(spare)
            if libc.fallocate(file.fileno(), _KEEP_SIZE, *sizes) == 0:
                at += spare
            elif (code := ctypes.get_errno()) != errno.ENOSPC:  # else the job was quicker
                raise OSError(code, f"{path.parent} can't be filled: {os.strerror(code)}")
    raise ChaosError(f"{path.parent} could not be filled: {room(path.parent)[0]} bytes are still free")


def folder_of(site: Site) -> Path:
    if site.checkpoints is None or not is_own_disk(site.checkpoints):
        raise ChaosError("the checkpoints have no file system of their own to fill; write job.checkpoints.size")
    return site.checkpoints.resolve()


def _path(site: Site) -> Path:
    return folder_of(site) / f".torchaos-ballast-{site.fault}"
