"""Background threads of the agent, which run beside the job's own threads."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Callable

from ..protocol.rank_files import THREAD


class Helper:
    """A background thread that lives as long as the process. `idle`: it runs at the lowest priority."""

    def __init__(self, idle: bool = False) -> None:
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue()
        self._idle = idle
        threading.Thread(target=self._work, name="torchaos-manifest", daemon=True).start()

    def do(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits until all work that was given so far is done, at most `timeout_s` seconds (None: no limit)."""
        if timeout_s is None:
            self._queue.join()
            return
        done = threading.Event()
        self.do(done.set)
        done.wait(timeout_s)

    def lend_a_hand(self, until: Callable[[], bool]) -> None:
        """Does queued work in the calling thread, until `until()` is true or the queue is empty. If all processors are
        busy, this is quicker than to wait for the helper thread."""
        while not until():
            try:
                work = self._queue.get_nowait()
            except queue.Empty:
                return
            try:
                work()
            finally:
                self._queue.task_done()

    def waiting(self) -> int:
        return self._queue.qsize()

    def _work(self) -> None:
        _present(self._idle)
        while True:
            work = self._queue.get()
            try:
                work()
            finally:
                del work  # it holds tensors
                self._queue.task_done()


def _present(idle: bool) -> None:
    """Sets this thread's name and, if `idle`, the lowest priority. Does nothing on systems that don't allow it."""
    try:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD)
        if idle:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux: of this thread
    except (AttributeError, OSError):
        pass
