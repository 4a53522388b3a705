"""Watches, by an audit hook, what the product does to the machine while it reads a bad input, and refuses harm: writes
outside the given folder, new processes, sockets, and signals to processes that are not ours."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {
    "os.remove": (0,), "os.rename": (0, 1), "os.mkdir": (0,), "os.rmdir": (0,), "os.link": (0, 1), "os.symlink": (1,),
    "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,), "os.truncate": (0,), "shutil.rmtree": (0,),
    "os.setxattr": (0,),
}  # fmt: skip
_NEVER = (
    "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "pty.", "socket.connect",
    "socket.bind", "socket.sendto", "signal.pthread_kill", "ftplib.", "urllib.", "webbrowser.",
)  # fmt: skip
_QUESTIONS = (("squeue",), ("sinfo",), ("kubectl", "--context=nowhere", "get"))  # programs that change nothing
_CALLS = {"mount", "umount", "umount2", "setns", "unshare", "kill", "reboot", "ptrace"}


class Refused(OSError):
    """Raised instead of harm."""


class Hung(BaseException):
    """The input took longer than its limit."""


class Guard:
    """One per process, since an audit hook can't be removed. `harm`: what was tried during the last `watching`."""

    def __init__(self) -> None:
        self.harm: list[str] = []
        self._folder: str | None = None
        self._spared: set[int] = set()
        sys.addaudithook(self._see)
        self._send = signal.pidfd_send_signal
        signal.pidfd_send_signal = self._signal
        self._alarm_before = signal.signal(signal.SIGALRM, self._alarm)

    def remove(self) -> None:
        """Remove everything except the audit hook, which does nothing outside of `watching`."""
        signal.pidfd_send_signal = self._send
        signal.signal(signal.SIGALRM, self._alarm_before)

    @contextmanager
    def watching(self, folder: Path, limit_s: float, ours: set[int] = frozenset()) -> Iterator[None]:  # type: ignore[assignment]
        """`ours`: pids that may get signals. Raises Hung after `limit_s` seconds."""
        self.harm, self._spared, self._folder = [], set(ours), f"{folder}/"
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._folder = None

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._folder is None:
            return
        if event == "open":
            path, mode, flags = arguments
            if (isinstance(flags, int) and flags & _WRITES) or (isinstance(mode, str) and set(mode) & set("wax+")):
                self._check("open for writing", path)
        elif event in _PATHS:
            for number in _PATHS[event]:
                self._check(event, arguments[number])
        elif event == "subprocess.Popen" and any(tuple(arguments[1][: len(one)]) == one for one in _QUESTIONS):
            return
        elif event.startswith(_NEVER) or (event == "ctypes.dlsym" and arguments[1] in _CALLS):
            self._refuse(f"{event} {arguments!r:.200}")

    def _check(self, what: str, path: object) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # a descriptor, which was opened before
        whole = os.path.realpath(os.fsdecode(path))
        if not f"{whole}/".startswith(self._folder or "/") and whole != "/dev/null":
            self._refuse(f"{what}: {whole}")

    def _signal(self, pidfd: int, number: int, *more: Any) -> None:
        with open(f"/proc/self/fdinfo/{pidfd}") as file:
            pid = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
        if self._folder is not None and pid not in self._spared:
            self._refuse(f"signal {number} to process {pid}")
        self._send(pidfd, number, *more)

    def _refuse(self, what: str) -> None:
        self.harm.append(what)
        raise Refused(f"refused by the guard: {what}")

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        raise Hung
