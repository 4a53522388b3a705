"""Starting a command and reading its output."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from torchaos.harness.interfaces import UsageError
from torchaos.harness.running.launchers.job import Command, Lines


def run(folder: Path, code: str) -> tuple[int, list[str], bytes]:
    lines: list[str] = []
    log = folder / "job.log"
    command = Command([sys.executable, "-uc", code], folder, os.environ, log, lambda line, _at: lines.append(line))
    exit_code = command.wait()
    assert command.drain(20.0)
    return exit_code, lines, log.read_bytes()


def test_output_is_kept_raw_and_read_as_lines(tmp_path: Path) -> None:
    """The log has every byte of stdout and stderr in order; lines also end with a carriage return or the output."""
    code = r"import os; os.write(1, b'a\n'); os.write(2, b'10%\r20%\r'); os.write(1, b'\xff\n\nlast')"
    assert run(tmp_path, code) == (0, ["a", "10%", "20%", "\ufffd", "last"], b"a\n10%\r20%\r\xff\n\nlast")


def test_the_exit_by_a_signal_is_negative(tmp_path: Path) -> None:
    """A command that is killed has the signal's number, negative."""
    assert run(tmp_path, "import os; os.kill(os.getpid(), 9)")[0] == -9


def test_a_signal_that_interrupts_no_system_call_is_acted_on(tmp_path: Path) -> None:
    """One that comes right before the wait, or to another thread: its handler runs all the same, and not only when the
    command has ended."""
    command = Command(["sleep", "60"], tmp_path, os.environ, tmp_path / "job.log", lambda _line, _at: None)
    before = signal.signal(signal.SIGUSR1, lambda *_: signal.pidfd_send_signal(command.pidfd, signal.SIGKILL))
    told = threading.Timer(0.5, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
    begun = time.monotonic()
    told.start()
    try:
        assert command.wait() == -9
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - begun < 30.0


def test_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    """The command leads a session of its own, and its stdin is empty."""
    code = "import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))"
    assert run(tmp_path, code)[1] == ["True ''"]


def test_lines_have_the_time_when_they_came(tmp_path: Path) -> None:
    """Each line is stamped with CLOCK_MONOTONIC on arrival."""
    times: list[float] = []
    start = time.monotonic()
    code = "import time; print(1, flush=True); time.sleep(0.2); print(2, flush=True)"
    argv = [sys.executable, "-c", code]
    command = Command(argv, tmp_path, os.environ, tmp_path / "log", lambda _line, at: times.append(at))
    command.wait()
    assert command.drain(20.0)
    assert start < times[0] < times[1] < time.monotonic()
    assert times[1] - times[0] > 0.1


def test_a_command_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    """The message names the program and what to check."""
    with pytest.raises(UsageError, match=r"no-such-program: can't be started .* check job\.command"):
        Command(["no-such-program"], tmp_path, os.environ, tmp_path / "log", lambda _line, _at: None)


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    """A stream with no line end is handed on in pieces."""
    pieces: list[str] = []
    lines = Lines(lambda line, _at: pieces.append(line))
    for _ in range(100):
        lines.feed(b"x" * 10_000, 0.0)
    lines.end()
    assert sum(map(len, pieces)) == 1_000_000
    assert max(map(len, pieces)) < 100_000
