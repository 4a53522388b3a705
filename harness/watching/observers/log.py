"""Observer (a): the job's log has not grown for longer than usual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torchaos.harness.watching.observers.opinion import Learned, Opinion


class LogSilence:
    """Learns how often the log grows. `paths`: returns the current log files. Lines before training do not count."""

    name = "log"

    def __init__(self, paths: Callable[[], Sequence[Path]]) -> None:
        self._paths, self._size = paths, -1
        self._learned = Learned(needed=5)

    def look(self, now_s: float, training: bool) -> Opinion:
        paths = [path for path in self._paths() if path.exists()]
        if not paths:
            return Opinion(self.name, 0.0, 0.0, armed=False, blind="there is no log")
        size = sum(path.stat().st_size for path in paths)
        if size != self._size:
            self._size = size
            self._learned.happened(now_s, training)
        return self._learned.opinion(self.name, now_s)
