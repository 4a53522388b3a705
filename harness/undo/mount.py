"""The handle of a mount that a fault made, in this mount namespace."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from torchaos.harness.undo.touches import Touches

_DETACH = 2  # MNT_DETACH of umount2(2): also while files in it are open
_NO_FOLLOW = 8  # UMOUNT_NOFOLLOW
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """What is mounted at `target` with our tag as its source: it is unmounted, layer by layer, at once, even while it
    is in use. What lay there before shows again; anything else that is mounted there stays.

    The tag is the mount's source (mount -t tmpfs TAG TARGET, fsname=TAG for FUSE); of a bind mount, the name of the
    folder that is bound; of a loop device, the name of the image, whatever its suffix.
    """

    kind: ClassVar[str] = "mount"
    target: str
    tag: str  # "torchaos-" and something of this run

    def __post_init__(self) -> None:
        if not self.tag.startswith("torchaos-") or "/" in self.tag or not os.path.isabs(self.target):
            raise ValueError(f"{self.target} with the source {self.tag!r} is no mount of torchaos")

    def touches(self) -> Touches:
        return Touches(path=self.target)

    @classmethod
    def of(cls, target: Path, tag: str) -> Mount:
        """Of a mount that is still to be made. Raises ValueError where the tag is in use there already."""
        handle = cls(str(target.resolve()), tag)
        if not handle.restored():
            raise ValueError(f"{target}: there is a mount of that name already")
        return handle

    def restore(self) -> None:
        """Raises OSError where it can't be unmounted, ValueError where something else was mounted on top of it."""
        for _layer in range(64):
            layers = [one for one in mounts() if one.target == self.target]
            if not any(self._is_ours(one) for one in layers):
                return
            if not self._is_ours(layers[-1]):
                raise ValueError(f"{self.target}: something else was mounted on top of it since; unmount that first")
            import ctypes  # here, since it is slow to import and the reaper must start quickly

            libc = ctypes.CDLL(None, use_errno=True)
            if libc.umount2(os.fsencode(self.target), _DETACH | _NO_FOLLOW) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"{self.target} can't be unmounted: {os.strerror(code)}")

    def restored(self) -> bool:
        return not any(self._is_ours(one) for one in mounts() if one.target == self.target)

    def _is_ours(self, one: MountInfo) -> bool:
        return self.tag in (one.source, Path(one.root).name, Path(_image(one.source)).stem)


class MountInfo(NamedTuple):
    """A line of /proc/self/mountinfo, see proc_pid_mountinfo(5)."""

    id: int
    root: str  # the folder of the file system that is mounted
    target: str
    type: str
    source: str


def mounts() -> Iterator[MountInfo]:
    """In the order in which they were made: of several on one target, the last one is seen. Raises OSError."""
    with open("/proc/self/mountinfo") as file:
        for line in file:
            left, _dash, right = line.partition(" - ")
            fields, (kind, source, *_options) = left.split(" "), right.split(" ")
            yield MountInfo(int(fields[0]), _plain(fields[3]), _plain(fields[4]), kind, _plain(source.strip()))


def _image(source: str) -> str:
    """The file behind a loop device; empty for any other source."""
    if not source.startswith("/dev/loop"):
        return ""
    try:
        return (Path("/sys/block") / Path(source).name / "loop" / "backing_file").read_text().strip()
    except OSError:
        return ""


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)
