"""Points at which a process can die, and the death. DYING_AT is JSON: {"trace": PATH, "at": [[POINT, NTH, [WHO]]]}.

A point is a named place in the product. Each time that it is passed, the trace gets a line `ROLE POINT NTH`. When a
chosen point is passed the nth time, the processes in WHO (harness, reaper, job) get SIGKILL, and the trace gets a line
`died`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Points:
    def __init__(self, role: str, at: dict[str, Any]) -> None:
        self.role = role
        self._at: dict[tuple[str, int], list[str]] = {(point, nth): kill for point, nth, kill in at["at"]}
        self.pids = {role: os.getpid()}
        self._trace = os.open(at["trace"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._passed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def next_is_last(self, point: str) -> bool:
        return (f"{self.role} {point}", self._passed[point] + 1) in self._at

    def reach(self, point: str) -> None:
        with self._lock:
            self._passed[point] += 1
            nth = self._passed[point]
            self._say(f"{self.role} {point} {nth}")
            if victims := self._at.get((f"{self.role} {point}", nth)):
                self._die([who for who in victims if who in self.pids])

    def _die(self, victims: list[str]) -> None:
        """Kill the others first, and this process last. A process that does not exist is left out of the trace."""
        self._say(f"died {'+'.join(victims)}")
        for who in sorted(victims, key=lambda who: who == self.role):
            with suppress(ProcessLookupError):
                os.kill(self.pids[who], signal.SIGKILL)

    def _say(self, line: str) -> None:
        os.write(self._trace, line.encode() + b"\n")

    def around(self, where: Any, name: str, called: Callable[..., str]) -> None:
        """Add a point before and a point after each call of `where.name`. `called` names it from the arguments."""
        original = getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            point = called(*args, **kwargs)
            self.reach(f"before {point}")
            result = original(*args, **kwargs)
            self.reach(f"after {point}")
            return result

        setattr(where, name, call)


def make_mortal(module: str) -> None:
    roles = {"torchaos.harness": _harness, "torchaos.harness.rollback.reaper": _reaper}
    if module in roles:
        roles[module](json.loads(os.environ["DYING_AT"]))


def _harness(at: dict[str, Any]) -> None:
    from torchaos.harness.fault_drivers.site import OutsideSite
    from torchaos.harness.host import disk
    from torchaos.harness.protocol import wire
    from torchaos.harness.protocol.control_pages import ControlPage
    from torchaos.harness.rollback import reaper_client

    points = Points("harness", at)
    words = {number: name for name, number in vars(ControlPage).items() if name.isupper() and name != "SIZE"}

    def event(_file: Any, kind: Any, data: Any, **_more: Any) -> str:
        if kind is wire.Kind.JOB_STARTED:
            points.pids["job"] = data["pid"]
        return f"event {kind.value}"

    points.around(wire.EventFile, "emit", event)
    points.around(reaper_client.ReaperClient, "_ask", lambda _self, _s, **request: f"request {request['do']}")
    points.around(ControlPage, "write", lambda _page, word, *_more: f"page {words[word]}")
    points.around(OutsideSite, "signal", lambda *_more: "signal")
    points.around(disk, "write_atomically", lambda path, *_more, **_: f"file {path.name}")
    original = subprocess.Popen.__init__

    def start(popen: Any, argv: Any, *args: Any, **kwargs: Any) -> None:
        what = "reaper" if any("rollback.reaper" in str(word) for word in argv) else "process"
        points.reach(f"before start {what}")
        original(popen, argv, *args, **kwargs)
        if what == "reaper":
            points.pids["reaper"] = popen.pid
        points.reach(f"after start {what}")

    setattr(subprocess.Popen, "__init__", start)  # noqa: B010


def _reaper(at: dict[str, Any]) -> None:
    from torchaos.harness.rollback import handles, undo_log

    points = Points("reaper", at)
    points.pids["harness"] = os.getppid()
    points.around(undo_log.UndoLog, "append", lambda _log, line, *_more: f"line {line.get('state', 'header')}")
    for kind in vars(handles).values():  # the reaper itself runs as __main__
        if isinstance(kind, type) and "undo" in vars(kind) and isinstance(getattr(kind, "kind", None), str):
            points.around(kind, "undo", lambda handle: f"restore {handle.kind}")
            points.around(kind, "is_undone", lambda handle: f"look {handle.kind}")
    write, sync = os.pwrite, os.fsync

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if points.next_is_last("half a line"):
            write(fd, data[: len(data) // 2], offset)
        points.reach("half a line")
        return write(fd, data, offset)

    def fsync(fd: int) -> None:
        points.reach("before sync")
        sync(fd)

    vars(os).update(pwrite=pwrite, fsync=fsync)
