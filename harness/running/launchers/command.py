"""A command that was started: its process, and the thread that reads its output."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchaos.harness.contracts import UsageError
from torchaos.harness.machine import proc
from torchaos.harness.machine.waiting import wait_for

OnLine = Callable[[str, float], None]  # a line without its end, and when it came (CLOCK_MONOTONIC)
_PIPE_BYTES = 1 << 20  # the job must not wait when the harness is late
_LONGEST = 1 << 16  # bytes; a longer line is cut


class Command:
    """A command that was started. It runs in its own session, with an empty input, so that the harness's terminal does
    not affect it. Raises UsageError if it can't be started."""

    def __init__(
        self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path, on_line: OnLine
    ) -> None:  # fmt: skip
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lines = Lines(on_line)
        try:
            self._process = subprocess.Popen(
                argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            os.close(self._log)
            raise UsageError(f"{argv[0]}: can't be started in {cwd}: {error.strerror}; check job.command") from error
        self.pidfd, self._ticks = os.pidfd_open(self.pid), proc.ticks_of(self.pid)
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()
        try:
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except (OSError, AttributeError):  # over the user's limit; Python names F_SETPIPE_SZ only from 3.10 on
            pass
        self._reader = threading.Thread(target=self._read, name=f"log {self.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def over(self) -> bool:
        """Whether the command has ended."""
        return not proc.is_alive(self.pid, self._ticks)

    def wait(self) -> int:
        """The exit code; negative: the number of the signal that ended it."""
        first = self._process.returncode is None
        code = wait_for(self._process)
        if first:
            os.close(self.pidfd)
        return code

    def drain(self, timeout_s: float) -> bool:
        """Waits until all its output was read. False if a process still holds the other end of the pipe."""
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def _read(self) -> None:
        while chunk := os.read(self._pipe, 1 << 16):
            now = time.monotonic()
            try:
                os.write(self._log, chunk)
            except OSError:  # the disk is full: the job goes on anyway
                pass
            self._lines.feed(chunk, now)
        self._lines.end()
        os.close(self._log)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Lines:
    """Splits a stream into lines. A carriage return, as in a progress bar, also ends a line."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line
        self._rest = b""

    def feed(self, chunk: bytes, mono_s: float) -> None:
        *whole, self._rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > _LONGEST:
            whole, self._rest = [*whole, self._rest], b""
        for line in whole:
            if line:
                self._on_line(line.decode(errors="replace"), mono_s)

    def end(self) -> None:
        self.feed(b"\n", time.monotonic())
