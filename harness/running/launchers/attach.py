"""A job that was running before torchaos, given by the pid of its torchrun. It has no agent, and continues after
torchaos has ended."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.interfaces import UsageError
from torchaos.harness.monitoring.probes.census import check_agent
from torchaos.harness.monitoring.probes.job_log import JobLog, MetricsFile
from torchaos.harness.monitoring.probes.log_adapters import Adapter
from torchaos.harness.monitoring.probes.rank_probe import RankWatch, Sampling, exit_code
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.running.launchers.command import Lines
from torchaos.harness.running.launchers.job import RunningJob

_TAIL_S = 0.02


class Attached(RunningJob):
    """The job that torchaos is attached to. `log`: the file with the job's output, if there is such a file; it is read
    from its present end. Raises UsageError unless `pid` is a torchelastic agent of this user."""

    def __init__(
        self, pid: int, journal: Journal, *, log: Path | None = None, log_adapter: Adapter | None = None,
        watchdogs: Sequence[str] = (), metrics: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(RankWatch(journal, mark=None))
        self.pid, self._ticks = pid, check_agent(pid)
        self._pidfd = os.pidfd_open(pid)
        self._journal, self._log = journal, JobLog(journal, log_adapter, watchdogs)
        self._tail = _Tail(log, Lines(self._log.line)) if log else None
        self._sampling = Sampling([MetricsFile(metrics)] if metrics else [], self._log.emit)
        self._left = threading.Event()

    def start(self) -> None:
        data = {"submission": 0, "pid": self.pid, "node": 0, "attached": True}
        self._journal.emit(Kind.JOB_STARTED, data)
        self._journal.listen(self._note_attempt)
        self._watch.add_root(self.pid)
        self._watch.start()
        self._sampling.start()
        self._thread.start()

    def members(self) -> dict[int, int]:
        return {**self._watch.members(), self.pid: self._ticks}

    def stop(self, grace_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> list[int]:
        """Only stops watching, because torchaos does not end a job that it did not start. Returns an empty list."""
        if not self._left.is_set() and self._thread.ident is not None:
            self._left.set()
            self._thread.join()
            self._sampling.stop()
            self._watch.stop()
            os.close(self._pidfd)
        return []

    def _note_attempt(self, event: Event) -> None:
        """Notes the attempt of a rank that started. torchrun reports a restart only at log level INFO, which may be
        off."""
        if event.kind is Kind.RANK_UP and event.attempt is not None:
            self._log.in_round(event.attempt)

    def _live(self) -> None:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        while not self._left.is_set():
            gone = poll.poll(_TAIL_S * 1000)
            at_s = time.monotonic()
            if self._tail:
                self._tail.read(at_s)
            if gone:
                self._exit_code = exit_code(self.pid, self._ticks, self._pidfd)
                data = {"submission": 0, "pid": self.pid, "exit_code": self._exit_code}
                self._journal.emit(Kind.JOB_EXITED, data, mono_s=at_s)
                self._done.set()
                return


class _Tail:
    """Reads the text that is appended to a file from now on. Its times are the times of reading, up to 20 ms late."""

    def __init__(self, path: Path, lines: Lines) -> None:
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"{path}: the job's log can't be read: {error.strerror}") from error
        self._file.seek(0, os.SEEK_END)
        self._lines = lines

    def read(self, mono_s: float) -> None:
        while chunk := self._file.read(1 << 16):
            self._lines.feed(chunk, mono_s)
