"""The handle of one regular file."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torchaos.harness.machine.disk import born_ns, owner_only, sync_folder
from torchaos.harness.undo.touches import Touches


@dataclass(frozen=True)
class File:
    """One regular file under `root`: its bytes, mode, owner and time of change as they were, from a saved copy.

    It is put back where it is the file that was guarded (inode and birth time: changed in place), where it is missing,
    or where it holds what the fault put there (`made`). Any other file at that path is a stranger, and stays. One that
    was not there before (`sha256` is None) is removed where it holds `made`.

    `yields`: the job may move, remove or replace the file meanwhile, as it does with its checkpoints; what it did
    stands. A file that it moved within `root`, or whose folder it moved, is put back where it is now. One that went
    with its folder, or was removed or written anew by the job, leaves nothing to put back.

    Several faults may be on one file: the healer takes them back in reverse order, and `note` lets each know its own
    work again by its digest, though putting a file back makes another inode.
    """

    kind: ClassVar[str] = "file"
    path: str
    root: str  # nothing outside is touched
    copy: str | None = None
    sha256: str | None = None  # None: there was no such file
    mode: int = 0
    uid: int = -1
    gid: int = -1
    mtime_ns: int = 0
    inode: int = 0
    born_ns: int = 0  # 0 where the file system does not say
    made: str | None = None  # SHA-256 of what the fault puts in its place
    yields: bool = False
    removes: bool = False  # the fault itself removes it

    def touches(self) -> Touches:
        return Touches(path=self.path, own=self.copy)

    @classmethod
    def of(
        cls, path: Path, root: Path, copies: Path, made: str | None = None, *, yields: bool = False,
        removes: bool = False,
    ) -> File:  # fmt: skip
        """Reads the file and saves a copy, fsynced, in the folder `copies`. Raises ValueError for what can't be put
        back: a link, a hard-linked file, what is not a file, a path outside `root`; OSError as usual."""
        path, root = path.parent.resolve() / path.name, root.resolve()
        _check(path, root)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            if made is None:
                raise ValueError(
                    f"{path}: there is no such file, and what the fault will put there is not said"
                ) from None
            return cls(str(path), str(root), made=made)
        if found.st_nlink > 1:
            raise ValueError(f"{path}: it has {found.st_nlink} hard links, which putting it back would part")
        digest = _digest(path)
        copy = copies / f"{digest}.copy"
        _copy(path, copy, found.st_mtime_ns, 0o600)
        if _digest(copy) != digest:
            raise ValueError(f"{path}: it changes while it is being saved")
        return cls(
            str(path), str(root), str(copy), digest, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid,
            found.st_mtime_ns, found.st_ino, born_ns(path), made, yields, removes,
        )  # fmt: skip

    def note(self) -> None:
        """Call it when the fault has been applied: what is there now is its work, and anything else later the job's.
        Raises OSError; without the note the inode must do."""
        if self.copy is None:
            return
        with suppress(FileNotFoundError, PermissionError):  # the fault took it away, or the right to read it
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

    def restore(self) -> None:
        if self.restored():
            return
        path = self._place()
        present = path.exists()
        if present and not self._ours(path):
            raise ValueError(
                f"{path}: another file stands there now, which is neither the one that was guarded nor ours"
            )
        if self.sha256 is None:
            path.unlink()
        else:
            self._put_back(path)
        sync_folder(path.parent)

    def restored(self) -> bool:
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
        """Where the file is now: at its path, or, of a file that yields, where the job has moved it."""
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
        """Whether what stands there is the fault's work, or what the fault was to change."""
        same = self.sha256 is not None and os.lstat(path).st_ino == self.inode and born_ns(path) == self.born_ns
        made = self.made or self._noted()
        if made is None:
            return same
        try:
            found = _digest(path)
        except PermissionError:
            return same
        # A file that the job has written anew in place has the old inode, and is the job's all the same.
        return found == made or (same and (found == self.sha256 or not self.yields))

    def _noted(self) -> str | None:
        if self.copy is None:
            return None
        with suppress(OSError), open(self._note, opener=owner_only) as file:
            return file.read() or None
        return None

    def _put_back(self, path: Path) -> None:
        if self.copy is None or _digest(Path(self.copy)) != self.sha256:
            raise ValueError(f"{self.copy}: the saved copy of {path} is not what was saved")
        partial = path.with_name(f".{path.name}.torchaos-undo")
        try:
            _copy(Path(self.copy), partial, self.mtime_ns, self.mode, self.uid, self.gid)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _check(path: Path, root: Path) -> None:
    """Raises ValueError unless `path` is in `root`, no link is on the way, and it is a regular file or missing."""
    if path.parent.resolve() != path.parent or path.is_symlink():
        raise ValueError(f"{path}: there is a symbolic link in it, which is not followed")
    if not path.is_relative_to(root):
        raise ValueError(f"{path}: it is outside {root}, where nothing is touched")
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
    """A new file, on disk when this returns. Its time of change goes along: trainers choose a checkpoint by it."""
    target.unlink(missing_ok=True)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(source, "rb") as reader, open(fd, "wb") as writer:
        while block := reader.read(1 << 20):
            writer.write(block)
        writer.flush()
        found = os.fstat(fd)
        if (uid, gid) not in ((-1, -1), (found.st_uid, found.st_gid)):
            os.fchown(fd, uid, gid)
        os.fchmod(fd, mode)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        os.fsync(fd)
    sync_folder(target.parent)
