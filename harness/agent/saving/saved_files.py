"""Follows the files of checkpoints after a save: the paths to report (`absolute`); saved files that are renamed or
removed (`RenameHook`); and the files to which the job writes what torch.save wrote to memory (`BufferSaves`).

Many jobs write `ckpt-4.tmp` and rename it when it is complete, and many keep only the newest checkpoint. So os.rename
and os.replace (also called by Path.rename and Path.replace), os.remove, os.unlink, shutil.move (which copies the file
if the target is on another file system) and shutil.rmtree are wrapped. A rename or removal is reported after it has
succeeded.

During an exploration (`torchaos explore`), the objects of an S3 store are files in the folder that ENV_STORE names, and
they are reported by the paths of these files."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...protocol.wire import ENV_STORE, Kind
from ..agent import Agent

_S3 = "s3://"
_UNFINISHED = ".rclone_temp_"  # names of rclone's files for objects that are not complete yet


def absolute(place: str) -> str:
    """The path to report for a path or a URL."""
    store = os.environ.get(ENV_STORE)
    if store and place.startswith(_S3):
        return os.path.normpath(os.path.join(store, place[len(_S3) :]))
    return place if "://" in place else os.path.abspath(place)


def objects() -> Iterator[tuple[str, os.stat_result]]:
    """The files of the store's objects; nothing if the job has no such store."""
    folders = [os.environ[ENV_STORE]] if ENV_STORE in os.environ else []
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # an object may be replaced meanwhile
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.path)
                elif not entry.name.startswith(_UNFINISHED):
                    yield entry.path, entry.stat()


def writes(mode: Any, flags: Any) -> bool:
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
        return True
    return isinstance(mode, str) and any(letter in mode for letter in "wax+")


_REMEMBERED = 256  # saves that are remembered


class RenameHook:
    """Reports that saved checkpoints are renamed, and that saved or loaded checkpoints are removed."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._saved, self._loaded = agent, dict[str, None](), dict[str, None]()
        self._root, self._others = agent.plan.checkpoints, 0
        self._thread = threading.local()
        careful = agent.careful("checkpoints")
        self._note, self._found, self._gone = careful(self._renamed), careful(self._goes), careful(self._removed)

    def install(self) -> None:
        os.rename, os.replace = self._reporting(os.rename), self._reporting(os.replace)
        shutil.move = self._reporting(shutil.move)
        os.remove, os.unlink = self._removing(os.remove), self._removing(os.unlink)
        shutil.rmtree = self._removing(shutil.rmtree)  # type: ignore[assignment]
        if accessor := getattr(pathlib, "_NormalAccessor", None):  # Python 3.10 keeps references to both in it
            accessor.rename, accessor.replace = staticmethod(os.rename), staticmethod(os.replace)
            accessor.unlink = staticmethod(os.unlink)

    def saved(self, path: str) -> None:
        self._remember(self._saved, path)

    def loaded(self, path: str) -> None:
        self._remember(self._loaded, path)

    def _remember(self, paths: dict[str, None], path: str) -> None:
        paths.pop(path, None)
        paths[path] = None
        if len(paths) > _REMEMBERED:
            del paths[next(iter(paths))]

    def _reporting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def rename(*args: Any, **kwargs: Any) -> Any:
            if self._agent.look_for_saves is not None:
                self._agent.look_for_saves()
            outer, self._thread.moves = getattr(self._thread, "moves", False), True  # a move may copy and remove
            try:
                result = original(*args, **kwargs)
            finally:
                self._thread.moves = outer
            if self._saved and self._agent.sees_saves:
                self._note(result, *args, **kwargs)
            return result

        if original in os.supports_dir_fd:
            os.supports_dir_fd.add(rename)
        return rename

    def _removing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def remove(*args: Any, **kwargs: Any) -> Any:
            known = (self._saved or self._loaded or self._root) and self._agent.sees_saves
            path = self._found(*args, **kwargs) if known and not getattr(self._thread, "moves", False) else None
            result = original(*args, **kwargs)
            if path is not None:
                self._gone(path)
            return result

        if original in os.supports_dir_fd:
            os.supports_dir_fd.add(remove)
        return remove

    def _goes(self, path: Any, *_: Any, dir_fd: int | None = None, **_options: Any) -> str | None:
        """The path that is removed; None if its removal is not to be reported. It is reported if the path is or
        contains a file that was saved or loaded, or is in the folder of the checkpoints, where an earlier attempt may
        have saved it. It is not reported if the file keeps another name: a link is removed, or one of several names."""
        if dir_fd is not None:
            return None
        try:
            old = os.path.abspath(os.fsdecode(path))
            mine = [one for one in (*self._saved, *self._loaded) if one == old or one.startswith(old + os.sep)]
            root, whole = self._root, mine or [old]
            stays = os.path.islink(old) or any(os.path.isfile(one) and os.stat(one).st_nlink > 1 for one in whole)
            others = bool(root) and self._others < _REMEMBERED and (old == root or old.startswith(f"{root}{os.sep}"))
            others = others and os.path.exists(old)
        except (OSError, TypeError, ValueError):  # no path, or another rank removed it just now
            return None
        self._others += not mine and others
        return old if (mine or others) and not stays else None

    def _removed(self, path: str) -> None:
        if os.path.lexists(path):  # rmtree may ignore errors
            return
        self._agent.emit(Kind.REMOVED, {"path": path})
        for paths in (self._saved, self._loaded):
            for one in [one for one in list(paths) if one == path or one.startswith(path + os.sep)]:
                del paths[one]

    def _renamed(self, moved_to: Any, src: Any, dst: Any, *_: Any, **folders: Any) -> None:
        if any(isinstance(fd, int) for fd in folders.values()):  # relative to an open folder
            return
        old, new = (os.path.abspath(os.fsdecode(path)) for path in (src, moved_to or dst))
        mine = [path for path in list(self._saved) if path == old or path.startswith(old + os.sep)]
        if mine:
            self._agent.emit(Kind.RENAMED, {"path": old, "to": new})
        for path in mine:
            del self._saved[path]
            self.saved(new + path[len(old) :])


_BUFFERS = 4  # buffers that wait for their file
_FILES = 64  # opened files that are remembered
_END = 1 << 16  # bytes; of the end of a buffer, which is compared
_LOOKS = 32  # iterations: a thread may write the file some steps later
_TICK_S = 0.01  # the longest tick (CONFIG_HZ=100) of the clock from which Linux takes the times of files


@dataclass
class _Buffer:
    size: int
    end: bytes
    step: int  # iterations completed when it was saved
    blocked_s: float  # for how many seconds training waited for torch.save
    wall_s: float  # when it was saved, in seconds since the epoch
    looks: int = 0


class BufferSaves:
    """Finds the files to which the job writes what torch.save wrote to a buffer in memory, so that they count as saves.
    `found` gets the path of such a file, the step, and the seconds for which torch.save kept the training waiting.

    Many trainers save to a BytesIO, and a file backend then writes these bytes. After a torch.save to a buffer, the
    paths of files that are opened for writing are remembered. Such a file is that checkpoint if it has the size of the
    buffer and ends with the same bytes: a file of torch.save ends with an id that is made from its contents, and with
    the names, sizes and CRCs of its parts. The files are looked at before the next backward, optimizer step, rename or
    save to a buffer, and at the end of the process. If the process dies earlier, the save is not seen. If the job puts
    the bytes into an object store, its objects are looked at too."""

    def __init__(self, agent: Agent, found: Callable[[str, int, float], None]) -> None:
        self._agent, self._found = agent, found
        self._waiting: list[_Buffer] = []
        self._opened: dict[str, None] = {}
        self._known: set[tuple[str, int, int]] = set()  # objects that were reported: path, time and inode
        self._installed = False
        careful = agent.careful("checkpoints")
        self.saved, self.look, self._noted = careful(self._saved), careful(self._look), careful(self._note)

    def _saved(self, target: Any, blocked_s: float) -> None:
        """Must be called after a torch.save to `target`, which is not a file."""
        contents = getattr(target, "getbuffer", None)
        if contents is None:
            return
        self._look()
        with contents() as view:
            self._waiting.append(
                _Buffer(view.nbytes, bytes(view[-_END:]), self._agent.steps_over, blocked_s, time.time())
            )
        del self._waiting[:-_BUFFERS]
        self._opened.clear()
        self._agent.look_for_saves = self.look
        if not self._installed:
            self._installed = True
            sys.addaudithook(self._audit)  # it can't be removed, so it is added only for a job with buffers

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._waiting and event == "open":
            self._noted(*args)

    def _note(self, path: Any, mode: Any, flags: Any) -> None:
        if len(self._opened) < _FILES and isinstance(path, (str, bytes)) and writes(mode, flags):
            self._opened[os.path.abspath(os.fsdecode(path))] = None

    def _look(self) -> None:
        """Compares the files that were opened, and the new objects of a store, with the buffers."""
        for path in list(self._opened):
            buffer = next((buffer for buffer in self._waiting if _is_in(buffer, path)), None)
            if buffer is not None:
                del self._opened[path]
                self._waiting.remove(buffer)
                self._found(path, buffer.step, buffer.blocked_s)
        if self._waiting:
            self._look_at_objects()
        for buffer in self._waiting:
            buffer.looks += 1
        self._waiting = [buffer for buffer in self._waiting if buffer.looks < _LOOKS]
        self._agent.look_for_saves = self.look if self._waiting else None

    def _look_at_objects(self) -> None:
        """Looks at the new objects of the store. All objects with the bytes of a buffer count, because another rank may
        have put the same bytes under its own name."""
        found: list[_Buffer] = []
        for path, about in objects():
            version = path, about.st_mtime_ns, about.st_ino
            new = [
                one for one in self._waiting if one.wall_s - _TICK_S <= about.st_mtime and version not in self._known
            ]
            if own := [buffer for buffer in new if _is_in(buffer, path)][-1:]:
                self._known.add(version)
                self._found(path, own[0].step, own[0].blocked_s)
                found += own
        self._waiting = [buffer for buffer in self._waiting if buffer not in found]


def _is_in(buffer: _Buffer, path: str) -> bool:
    try:
        if os.stat(path).st_size != buffer.size:
            return False
        with open(path, "rb") as file:
            file.seek(-len(buffer.end), os.SEEK_END)
            return file.read() == buffer.end
    except OSError:
        return False
