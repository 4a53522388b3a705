"""A running job, started by a launcher or attached to."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable

from torchaos.harness.running.launchers.job_view import JobView
from torchaos.harness.watching.probes.ranks import RankWatch


class RunningJob(JobView):
    """A job that the harness starts (or attaches to), follows to its end, and stops."""

    def __init__(self, watch: RankWatch) -> None:
        super().__init__(watch)
        self._exit_code: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._live, name="job", daemon=True)

    @abstractmethod
    def start(self) -> None:
        """Starts the job. Raises UsageError if the command can't be started."""

    @property
    def done(self) -> bool:
        """Whether the last submission has ended. Some of its processes may still be alive until `stop`."""
        return self._done.is_set()

    @property
    def trouble(self) -> str:
        """Why the run can't go on, as a clause; empty if nothing is wrong."""
        return ""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits until the last submission has ended, and returns its exit code (negative: the number of a signal). None
        while it runs, or if only the job's parent process can know the code."""
        return self._exit_code if self._done.wait(timeout_s) else None

    @abstractmethod
    def stop(self, grace_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> list[int]:
        """Ends every process of the job. Returns the pids that could not be ended."""

    @abstractmethod
    def _live(self) -> None:
        """Follows the job to its end. Runs in its own thread."""
