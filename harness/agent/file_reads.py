"""Records which of the job's own files a process reads (`FileReads`)."""

from __future__ import annotations

import os
import sys
from importlib.util import source_from_cache
from typing import Any

from ..protocol.wire import FAILED, LISTED, READ, WRITTEN
from .agent import Agent
from .job_signals import raise_if_of_the_job
from .saving.saved_files import writes

MOST = 5000  # paths that a process records at most
_MADE = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}  # which argument is the path that is made
_FOLDERS = {"os.listdir", "os.scandir"}
_NOT_OWN = ("/proc/", "/sys/", "/dev/", os.path.dirname(os.__file__) + "/", os.path.dirname(__file__) + "/")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_MODULES = (".py", ".so")
# Parts of Python and of packages that list each folder on sys.path, to find modules and distributions.
_FINDERS = ("<frozen importlib", "/importlib/metadata/", "/importlib_metadata/", "/pkgutil.py", "/pkg_resources/")


class FileReads:
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
            raise_if_of_the_job(error)
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


def _source(cached: str) -> str:
    """The source file of a module's byte code, or empty if it has none."""
    try:
        return source_from_cache(cached)
    except ValueError:
        return ""


def _imports() -> bool:
    """Whether the import system made this call, or another search for modules or distributions."""
    try:
        caller = sys._getframe(3).f_code.co_filename
    except ValueError:
        return False
    return any(part in caller for part in _FINDERS)
