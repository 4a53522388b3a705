"""Reports renames of saved checkpoints: many jobs write `ckpt-4.tmp` and rename it when it is complete.

Python's audit event `os.rename` comes before each os.rename, os.replace, Path.rename and shutil.move, under whatever
name the job calls them. The event does not say whether the rename will succeed; shutil.move copies if it does not.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .agent import Agent
from .wire import Kind

_MOST = 256  # saves that are remembered


class Renames:
    """An audit hook can't be removed, so this one returns at once for every event that is no rename."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._saved = agent, dict[str, None]()
        self._note = agent.careful("checkpoints")(self._on_rename)

    def install(self) -> None:
        sys.addaudithook(self._audit)

    def saved(self, path: str) -> None:
        self._saved.pop(path, None)
        self._saved[path] = None
        if len(self._saved) > _MOST:
            del self._saved[next(iter(self._saved))]

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and self._saved and self._agent.on and "checkpoints" in self._agent.live:
            self._note(*args)

    def _on_rename(self, source: Any, target: Any, *folders: int) -> None:
        if any(fd >= 0 for fd in folders):  # relative to an open folder
            return
        old, new = (os.path.abspath(os.fsdecode(path)) for path in (source, target))
        mine = [path for path in list(self._saved) if path == old or path.startswith(old + os.sep)]
        if mine:
            self._agent.emit(Kind.RENAMED, {"path": old, "to": new})
        for path in mine:
            del self._saved[path]
            self.saved(new + path[len(old) :])
