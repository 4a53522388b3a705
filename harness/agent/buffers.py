"""Finds the file to which the job writes what torch.save wrote to a buffer in memory, so that it counts as a save.

Many trainers save to a BytesIO, and a file backend then writes these bytes. After a torch.save to a buffer, the paths
of files that are opened for writing are remembered. Such a file is that checkpoint if it has the size of the buffer and
ends with the same bytes: a file of torch.save ends with an id that is made from its contents, and with the names, sizes
and CRCs of its parts. A file is looked at before the next backward, optimizer step, rename or save to a buffer, and at
the end of the process. If the process dies earlier, the save is not seen.

If the job puts the bytes into an object store, its objects are looked at instead (places.py)."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Callable

from .agent import Agent
from .places import objects
from .reads import writes

_MOST = 4  # buffers that wait for their file
_FILES = 64  # files that were opened since
_END = 1 << 16  # bytes at the end that are compared
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
    """`found` gets the path, the step and the blocked seconds of each file that has the contents of a buffer."""

    def __init__(self, agent: Agent, found: Callable[[str, int, float], None]) -> None:
        self._agent, self._found = agent, found
        self._waiting: list[_Buffer] = []
        self._opened: dict[str, None] = {}
        self._known: set[tuple[str, int, int]] = set()  # objects that were told: path, time and inode
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
        """All objects with the bytes of a buffer count: another rank may have put the same bytes under its own name."""
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
