"""The handles that undo changes of one regular file (`File`), and a mount that a fault made (`Mount`), in the mount
namespace of this process. In `Touches`, each handle declares what it may change; this declaration alone decides whether
a fault is permitted."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from torchaos.harness.host.disk import born_ns, owner_only, sync_folder
from torchaos.harness.host.network_namespace import NetworkNamespace


@dataclass(frozen=True)
class Touches:
    """What a handle may change. At least one field must be set; otherwise the constructor raises ValueError."""

    process: tuple[int, int] | None = None  # pid and start time (clock ticks since boot) of a process of the job
    run_id: str | None = None  # everything that carries the id of this run
    network: NetworkNamespace | None = None  # a network namespace; the host's own namespace needs consent
    path: str | None = None  # a path in the run directory or among the job's checkpoints
    own: str | None = None  # a path that must be in the run directory
    marked: str | None = None  # a name that only torchaos uses; the handle's constructor checks it

    def __post_init__(self) -> None:
        if not any((self.process, self.run_id, self.network, self.path, self.own, self.marked)):
            raise ValueError("a handle that does not say what it touches can't be permitted")


@dataclass(frozen=True)
class File:
    """A regular file below `root`, with a saved copy of it: bytes, mode, owner and time of change before the fault.

    Undo puts the copy back if the path has the saved file (same inode and birth time: it was changed in place), no
    file, or the file that the fault put there (`made`). Any other file at the path was made by somebody else, and
    stays. If there was no file before (`sha256` None), undo removes the file that has the digest `made`.

    `yields`: the job may move, remove or replace the file before the undo, as it does with its checkpoints, and then
    the job's changes stay. If the job moved the file within `root`, the copy is put back at the new place. If the job
    removed or rewrote the file, nothing is undone.

    Several faults may change the same file. They are undone in reverse order. A file that was put back has a new inode,
    so `note` stores the digest by which each fault recognises the file that it made."""

    kind: ClassVar[str] = "file"
    path: str
    root: str  # nothing outside this folder is changed
    copy: str | None = None
    sha256: str | None = None  # None: there was no file before
    mode: int = 0
    uid: int = -1
    gid: int = -1
    mtime_ns: int = 0
    inode: int = 0
    born_ns: int = 0  # 0 if the file system does not store the birth time
    made: str | None = None  # SHA-256 of the file that the fault puts there
    yields: bool = False
    removes: bool = False  # the fault itself removes the file

    def touches(self) -> Touches:
        return Touches(path=self.path, own=self.copy)

    @classmethod
    def of(
        cls, path: Path, root: Path, copies: Path, made: str | None = None, *, yields: bool = False,
        removes: bool = False,
    ) -> File:  # fmt: skip
        """Saves a copy of the file in the folder `copies`; it is on disk when this returns. Raises ValueError for a
        link, a hard-linked file, anything else that is not a regular file, and a path outside `root`. Raises OSError if
        reading or writing fails."""
        path, root = path.parent.resolve() / path.name, root.resolve()
        _check(path, root)
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            if made is None:
                raise ValueError(
                    f"{path}: there is no such file, and the handle lacks the digest of the file to be made"
                ) from None
            return cls(str(path), str(root), made=made)
        if info.st_nlink > 1:
            raise ValueError(f"{path}: it has {info.st_nlink} hard links, and a restored file would lose them")
        digest = _digest(path)
        copy = copies / f"{digest}.copy"
        _copy(path, copy, info.st_mtime_ns, 0o600)
        if _digest(copy) != digest:
            raise ValueError(f"{path}: it changes while it is being saved")
        return cls(
            str(path), str(root), str(copy), digest, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid,
            info.st_mtime_ns, info.st_ino, born_ns(path), made, yields, removes,
        )  # fmt: skip

    def note(self) -> None:
        """Must be called after the fault was applied. Stores the digest of the present contents as the fault's own, so
        that every later change counts as the job's. Without this digest, the fault's file is recognised by its inode.
        Raises OSError if the file can't be read or the digest can't be stored."""
        if self.copy is None:
            return
        with suppress(FileNotFoundError, PermissionError):  # the fault removed the file, or the right to read it
            digest, target = _digest(Path(self.path)), self._note
            with open(target.with_suffix(".partial"), "w", opener=owner_only) as file:
                file.write(digest)
                file.flush()
                os.fsync(file.fileno())
            target.with_suffix(".partial").replace(target)
            sync_folder(target.parent)

    @property
    def _note(self) -> Path:
        key = f"{self.path} {self.inode} {self.born_ns} {self.sha256}"
        return Path(self.copy or "").with_name(f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.made")

    def undo(self) -> None:
        if self.is_undone():
            return
        path = self._place()
        present = path.exists()
        if present and not self._ours(path):
            raise ValueError(
                f"{path}: there is another file now, neither the original file nor the one that the fault made"
            )
        if self.sha256 is None:
            path.unlink()
        else:
            self._put_back(path)
        sync_folder(path.parent)

    def is_undone(self) -> bool:
        path = self._place()
        if self.yields and self._superseded(path):
            return True
        _check(path, Path(self.root))
        if not path.exists():
            return self.sha256 is None
        found = os.lstat(path)
        return stat.S_IMODE(found.st_mode) == self.mode and _digest(path) == self.sha256

    def _superseded(self, path: Path) -> bool:
        if not path.parent.is_dir():
            return True
        return not self._ours(path) if os.path.lexists(path) else not self.removes

    def _place(self) -> Path:
        """The present path of the file. It is a new path if the handle `yields` and the job has moved the file."""
        path = Path(self.path)
        if not self.yields or self.sha256 is None or (os.path.lexists(path) and self._ours(path)):
            return path
        for folder, _below, names in os.walk(self.root):
            for name in names:
                found = Path(folder, name)
                with suppress(OSError):
                    if os.lstat(found).st_ino == self.inode and self._ours(found):
                        return found
        return path

    def _ours(self, path: Path) -> bool:
        """Whether the file at `path` is the file that the fault made, or the original file that the fault was to
        change."""
        same = self.sha256 is not None and os.lstat(path).st_ino == self.inode and born_ns(path) == self.born_ns
        made = self.made or self._noted_digest()
        if made is None:
            return same
        try:
            found = _digest(path)
        except PermissionError:
            return same
        # A file that the job has rewritten in place has the same inode, but is the job's.
        return found == made or (same and (found == self.sha256 or not self.yields))

    def _noted_digest(self) -> str | None:
        if self.copy is None:
            return None
        with suppress(OSError), open(self._note, opener=owner_only) as file:
            return file.read() or None
        return None

    def _put_back(self, path: Path) -> None:
        if self.copy is None or _digest(Path(self.copy)) != self.sha256:
            raise ValueError(f"{self.copy}: the saved copy of {path} has changed since it was saved")
        partial = path.with_name(f".{path.name}.torchaos-undo")
        try:
            _copy(Path(self.copy), partial, self.mtime_ns, self.mode, self.uid, self.gid)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _check(path: Path, root: Path) -> None:
    """Raises ValueError unless `path` is in `root`, contains no link, and is a regular file or missing."""
    if path.parent.resolve() != path.parent or path.is_symlink():
        raise ValueError(f"{path}: there is a symbolic link in this path, and links are not followed")
    if not path.is_relative_to(root):
        raise ValueError(f"{path}: it is outside {root}, so it is not touched")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: its folder is gone")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: it is not a regular file")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _copy(source: Path, target: Path, mtime_ns: int, mode: int, uid: int = -1, gid: int = -1) -> None:
    """Copies a file to `target`, which must be on disk when this returns. The copy gets the time of change `mtime_ns`,
    because trainers read it."""
    target.unlink(missing_ok=True)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(source, "rb") as reader, open(fd, "wb") as writer:
        while block := reader.read(1 << 20):
            writer.write(block)
        writer.flush()
        info = os.fstat(fd)
        if (uid, gid) not in ((-1, -1), (info.st_uid, info.st_gid)):
            os.fchown(fd, uid, gid)
        os.fchmod(fd, mode)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        os.fsync(fd)
    sync_folder(target.parent)


_DETACH = 2  # MNT_DETACH of umount2(2): unmount even while its files are open
_NO_FOLLOW = 8  # UMOUNT_NOFOLLOW
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A mount that torchaos made at `target`. Undo unmounts all mounts there that have the tag, the last one first,
    even while they are in use. Other mounts at `target` stay. The tag is the source of the mount (mount -t tmpfs TAG
    TARGET; fsname=TAG for FUSE). For a bind mount it is the name of the bound folder; for a loop device, the name of
    its image without the suffix."""

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
        """The handle of a mount that is about to be made. Raises ValueError if there is already a mount with this
        tag."""
        handle = cls(str(target.resolve()), tag)
        if not handle.is_undone():
            raise ValueError(f"{target}: there is a mount of that name already")
        return handle

    def undo(self) -> None:
        """Unmounts the mounts. Raises OSError if that fails, and ValueError if another mount was made on top of
        them."""
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

    def is_undone(self) -> bool:
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
    """All mounts in the order in which they were made. The last mount at a target hides the others. Raises OSError if
    /proc can't be read."""
    with open("/proc/self/mountinfo") as file:
        for line in file:
            left, _dash, right = line.partition(" - ")
            fields, (kind, source, *_options) = left.split(" "), right.split(" ")
            yield MountInfo(int(fields[0]), _plain(fields[3]), _plain(fields[4]), kind, _plain(source.strip()))


def _image(source: str) -> str:
    """The file behind a loop device. Empty for any other source."""
    if not source.startswith("/dev/loop"):
        return ""
    try:
        return (Path("/sys/block") / Path(source).name / "loop" / "backing_file").read_text().strip()
    except OSError:
        return ""


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)
