"""The base class of `storage.fill`: a file that takes the free space of the checkpoints' own file system.

The file is empty, but has blocks beyond its end. So it has the same contents (none) even if the harness dies while it
fills the disk, and removing it frees all of its space."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import ChaosError, Emit, Evidence, Handle, Hits, NodeSite, Where
from torchaos.harness.mechanics.storage.own_disk import is_own_disk, room
from torchaos.harness.undo.file import File

if TYPE_CHECKING:
    from torchaos.harness.record.record import Record

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of fallocate(2)
_TRIES = 100  # calls of fallocate, since the job writes and removes files meanwhile


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
        """Fills the file system. Raises ChaosError if more than `left` bytes stay free, and OSError."""
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
                elif (code := ctypes.get_errno()) != errno.ENOSPC:  # else the job was quicker
                    raise OSError(code, f"{path.parent} can't be filled: {os.strerror(code)}")
        raise ChaosError(f"{path.parent} could not be filled: {room(path.parent)[0]} bytes are still free")

    def probes(self, site: NodeSite) -> Sequence[Room]:
        return [Room(site.fault, _path(site).parent, self.left)]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Evidence that the file system was full, as seen from outside, and that a save failed at that time while no
        other fault was applied."""
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
