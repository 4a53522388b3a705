"""Reports renames of saved checkpoints. Many jobs write `ckpt-4.tmp` and rename the file when it is complete.

Wraps os.rename and os.replace, which Path.rename and Path.replace also use, and shutil.move, which copies the file to
another file system. A rename is reported after it has succeeded."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
from typing import Any, Callable

from .agent import Agent
from .wire import Kind

_MOST = 256  # saves that are remembered


class Renames:
    def __init__(self, agent: Agent) -> None:
        self._agent, self._saved = agent, dict[str, None]()
        self._note = agent.careful("checkpoints")(self._renamed)

    def install(self) -> None:
        os.rename, os.replace = self._reporting(os.rename), self._reporting(os.replace)
        shutil.move = self._reporting(shutil.move)
        if accessor := getattr(pathlib, "_NormalAccessor", None):  # Python 3.10 keeps references to both in it
            accessor.rename, accessor.replace = staticmethod(os.rename), staticmethod(os.replace)

    def saved(self, path: str) -> None:
        self._saved.pop(path, None)
        self._saved[path] = None
        if len(self._saved) > _MOST:
            del self._saved[next(iter(self._saved))]

    def _reporting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def rename(*args: Any, **kwargs: Any) -> Any:
            if self._agent.look_for_saves is not None:
                self._agent.look_for_saves()
            result = original(*args, **kwargs)
            if self._saved and self._agent.sees_saves:
                self._note(result, *args, **kwargs)
            return result

        if original in os.supports_dir_fd:
            os.supports_dir_fd.add(rename)
        return rename

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
