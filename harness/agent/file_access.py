"""Which files the job reads and writes: the paths of checkpoints (`absolute`), the job's own files that it reads
(`Reads`), and the files to which it writes what torch.save wrote to memory (`Buffers`).

During an exploration (`torchaos explore`), the objects of an S3 store are files in the folder that ENV_STORE names, and
they are reported by the paths of these files."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import source_from_cache
from typing import Any

from ..protocol.rank_files import FAILED, LISTED, READ, WRITTEN
from ..protocol.wire import ENV_STORE
from .agent import Agent

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


MOST = 5000  # paths that a process records at most
_MADE = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}  # which argument is the path that is created
_FOLDERS = {"os.listdir", "os.scandir"}
_NOT_OWN = ("/proc/", "/sys/", "/dev/", os.path.dirname(os.__file__) + "/", os.path.dirname(__file__) + "/")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_MODULES = (".py", ".so")


class Reads:
    """Records which of the job's own files this process reads, from Python's audit events. A cached twin is used again
    only while these files are unchanged. Files that native code opens, and checks whether a file exists, raise no audit
    event.

    Own files are Python modules that are not part of an installation, and files below the working directory or beside
    such a module. Each is written once to this rank's file in agent/reads, as a letter, the path and a NUL. Forked
    children (data-loader workers) write to the same file. An audit hook can't be removed, so it returns at once after
    MOST paths are recorded."""

    def __init__(self, agent: Agent) -> None:
        run = os.path.dirname(agent.plan.events)
        folder = os.path.join(run, "agent", "reads")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, agent.who.source)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._agent, self._not_own = agent, (*_NOT_OWN, run + "/")
        self._roots: tuple[str, ...] = (_below(os.getcwd()),)
        self._seen: set[tuple[str, str]] = set()
        self._on = True

    def install(self) -> None:
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on or not (event == "open" or event in _MADE or event in _FOLDERS):
            return
        try:
            self._note(event, args)
        except Exception as error:
            self._on = False
            os.write(self._fd, f"{FAILED}\0".encode())
            self._agent.fail("reads", error)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            letter, raw = WRITTEN if writes(*args[1:]) else READ, args[0]
        elif event in _MADE:
            letter, raw = WRITTEN, args[_MADE[event]]
        else:
            letter, raw = LISTED, "." if args[0] is None else args[0]
        if isinstance(raw, int) or (path := os.fsdecode(raw)).startswith(self._not_own):
            return
        if (letter, path) in self._seen:
            return
        absolute = os.path.abspath(path)
        if absolute != path and (letter, absolute) in self._seen:
            return
        if absolute.endswith(".pyc"):  # Python writes it as a cache, which is no output of the job
            absolute = _source(absolute) if letter == READ else ""
        if absolute and self._is_own(absolute) and not (letter == LISTED and _imports()):
            self._record(letter, absolute)

    def _is_own(self, path: str) -> bool:
        if path.startswith(self._not_own) or any(part in path for part in _INSTALLED):
            return False
        if path.endswith(_MODULES):
            root = _below(os.path.dirname(path))
            if not root.startswith(self._roots):
                self._roots = (*self._roots, root)
            return True
        return path.startswith(self._roots)

    def _record(self, letter: str, path: str) -> None:
        if (letter, path) in self._seen:
            return
        self._seen.add((letter, path))
        os.write(self._fd, letter.encode() + os.fsencode(path) + b"\0")
        self._agent.saw("reads")
        if len(self._seen) >= MOST:
            self._on = False
            self._seen.clear()


def _below(folder: str) -> str:
    return folder.rstrip("/") + "/"


def writes(mode: Any, flags: Any) -> bool:
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
        return True
    return isinstance(mode, str) and any(letter in mode for letter in "wax+")


def _source(cached: str) -> str:
    """The source file of a module's byte code, or empty if it has none."""
    try:
        return source_from_cache(cached)
    except ValueError:
        return ""


def _imports() -> bool:
    """Whether the import system made this call: it lists every folder in which it looks for modules."""
    try:
        return sys._getframe(3).f_code.co_filename.startswith("<frozen importlib")
    except ValueError:
        return False


_MOST = 4  # buffers that wait for their file
_FILES = 64  # opened files that are remembered
_END = 1 << 16  # bytes; of the end of a buffer, which is compared
_LOOKS = 32  # a thread may write the file some steps later
_TICK_S = 0.01  # the longest tick (CONFIG_HZ=100) of the clock from which Linux takes the times of files


@dataclass
class _Buffer:
    size: int
    end: bytes
    step: int  # iterations completed when it was saved
    blocked_s: float  # for how many seconds training waited for torch.save
    wall_s: float  # when it was saved, in seconds since the epoch
    looks: int = 0


class Buffers:
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
        del self._waiting[:-_MOST]
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
