"""Threads of ours beside the job's: what they do is in nobody's way."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Callable

THREAD = "torchaos"  # what the kernel calls our threads: storage faults spare them, for what they read proves nothing


class Helper:
    """A thread that works beside the job's. It lives as long as the process. `idle`: it takes what time of a processor
    nobody else wants."""

    def __init__(self, idle: bool = False) -> None:
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue()
        self._idle = idle
        threading.Thread(target=self._work, name="torchaos-manifest", daemon=True).start()

    def do(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for all that was given to it."""
        if timeout_s is None:
            self._queue.join()
            return
        done = threading.Event()
        self.do(done.set)
        done.wait(timeout_s)

    def lend_a_hand(self, until: Callable[[], bool]) -> None:
        """Do here what waits for the thread: where every processor is busy, its turn may take longer than the work."""
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
                del work  # the tensors that it holds
                self._queue.task_done()


def _present(idle: bool) -> None:
    """Give this thread its name, and a low priority, where that can be done."""
    try:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD)
        if idle:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux, of one thread
    except (AttributeError, OSError):
        pass
