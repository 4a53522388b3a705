"""The handle of a mount that a fault made, in the mount namespace of this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from torchaos.harness.undo.touches import Touches

_DETACH = 2  # MNT_DETACH of umount2(2): unmount even while files in it are open
_NO_FOLLOW = 8  # UMOUNT_NOFOLLOW
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A mount that torchaos made at `target`. Undo unmounts all mounts there whose source is the tag, the last one
    first, even while they are in use. Other mounts at `target` stay. The tag is the mount's source (mount -t tmpfs TAG
    TARGET, fsname=TAG for FUSE). For a bind mount it is the name of the bound folder, for a loop device the name of its
    image without suffix."""

    kind: ClassVar[str] = "mount"
    target: str
    tag: str  # begins with "torchaos-", and names something of this run

    def __post_init__(self) -> None:
        if not self.tag.startswith("torchaos-") or "/" in self.tag or not os.path.isabs(self.target):
            raise ValueError(f"{self.target} with the source {self.tag!r} is no mount of torchaos")

    def touches(self) -> Touches:
        return Touches(path=self.target)

    @classmethod
    def of(cls, target: Path, tag: str) -> Mount:
        """The handle of a mount that is about to be made. Raises ValueError if a mount with this tag exists there."""
        handle = cls(str(target.resolve()), tag)
        if not handle.restored():
            raise ValueError(f"{target}: there is a mount of that name already")
        return handle

    def restore(self) -> None:
        """Unmounts the mounts. Raises OSError if that fails, ValueError if another mount was made on top of them."""
        for _layer in range(64):
            layers = [mount for mount in mounts() if mount.target == self.target]
            if not any(self._is_ours(mount) for mount in layers):
                return
            if not self._is_ours(layers[-1]):
                raise ValueError(f"{self.target}: something else was mounted on top of it since; unmount that first")
            import ctypes  # slow to import, and the reaper must start quickly

            libc = ctypes.CDLL(None, use_errno=True)
            if libc.umount2(os.fsencode(self.target), _DETACH | _NO_FOLLOW) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"{self.target} can't be unmounted: {os.strerror(code)}")

    def restored(self) -> bool:
        return not any(self._is_ours(mount) for mount in mounts() if mount.target == self.target)

    def _is_ours(self, mount: MountInfo) -> bool:
        return self.tag in (mount.source, Path(mount.root).name, Path(_image(mount.source)).stem)


class MountInfo(NamedTuple):
    """A line of /proc/self/mountinfo, see proc_pid_mountinfo(5)."""

    id: int
    root: str  # the folder of the file system that is mounted
    target: str
    type: str
    source: str


def mounts() -> Iterator[MountInfo]:
    """All mounts in the order in which they were made. The last mount at a target hides the others. Raises OSError."""
    with open("/proc/self/mountinfo") as file:
        for line in file:
            left, _dash, right = line.partition(" - ")
            fields, (kind, source, *_options) = left.split(" "), right.split(" ")
            yield MountInfo(int(fields[0]), _plain(fields[3]), _plain(fields[4]), kind, _plain(source.strip()))


def _image(source: str) -> str:
    """The file behind a loop device, or empty for any other source."""
    if not source.startswith("/dev/loop"):
        return ""
    try:
        return (Path("/sys/block") / Path(source).name / "loop" / "backing_file").read_text().strip()
    except OSError:
        return ""


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)
