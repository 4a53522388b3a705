"""What the kernel shows of a real process: an uninterruptible sleep that has ended or still lasts, and a slow call."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from torchaos.harness.interfaces import RankProcess, UsageError
from torchaos.harness.monitoring.diagnosis import kernel_trace
from torchaos.harness.monitoring.observers.hang_detectors import KernelSleeps
from torchaos.harness.protocol.wire import start_ticks

# posix_spawn shares its memory with the child until that has called exec: so long the caller sleeps in state D. Here
# the child first opens a pipe, which takes until somebody opens the other end.
SLEEPER = """
import os, sys
for line in sys.stdin:
    actions = [(os.POSIX_SPAWN_OPEN, 0, line.strip(), os.O_RDONLY, 0)]
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions), 0)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def _in_state_d(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"


@pytest.mark.needs("bpftrace")
def test_uninterruptible_sleeps(sleeper: subprocess.Popen[str], tmp_path: Path) -> None:
    """Two sleeps of a rank, one that ends and one that is under way when the look ends, are told."""
    pipe, threads = tmp_path / "pipe", []
    os.mkfifo(pipe)

    def sleep_twice() -> None:
        assert sleeper.stdin is not None
        for number in range(2):
            sleeper.stdin.write(f"{pipe}\n")
            sleeper.stdin.flush()
            wait_until(lambda: _in_state_d(sleeper.pid))
            if number == 0:
                time.sleep(0.3)  # how long it lasts
                os.close(os.open(pipe, os.O_WRONLY))

    def attached() -> None:
        threads.append(threading.Thread(target=sleep_twice))
        threads[0].start()

    found = kernel_trace.watch({5: sleeper.pid}, 3.0, attached=attached)
    threads[0].join()
    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    (words,) = map(str, found)
    assert words.startswith("rank 5 was in an uninterruptible sleep for ")
    longest, _, total = words.removeprefix("rank 5 was in an uninterruptible sleep for ").partition(" s, ")
    assert 0.25 <= float(longest) < float(total.split()[0]) - 0.2


@pytest.mark.needs("bpftrace")
def test_a_sleep_from_before_the_look(sleeper: subprocess.Popen[str], tmp_path: Path) -> None:
    """A rank that sleeps when the look begins, and still does at its end, is told with the time of the look; one that
    wakes in between and sleeps again is told with its second sleep alone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert sleeper.stdin is not None
    sleeper.stdin.write(f"{pipe}\n{pipe}\n")
    sleeper.stdin.flush()
    wait_until(lambda: _in_state_d(sleeper.pid))
    (whole,) = kernel_trace.watch({5: sleeper.pid}, 1.0)
    assert (whole.rank, whole.longest_s) == (5, whole.total_s)
    assert 1.0 <= whole.longest_s < 30.0  # a busy machine looks late
    again = kernel_trace.watch({5: sleeper.pid}, 1.0, attached=lambda: os.close(os.open(pipe, os.O_WRONLY)))
    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    assert len(again) == 1


@pytest.mark.needs("bpftrace")
def test_the_observer_names_the_rank_that_sleeps(sleeper: subprocess.Popen[str], tmp_path: Path) -> None:
    """Of two ranks, the one that sleeps in the kernel and not the one that waits for input."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert sleeper.stdin is not None
    sleeper.stdin.write(f"{pipe}\n")
    sleeper.stdin.flush()
    wait_until(lambda: _in_state_d(sleeper.pid))
    observer = KernelSleeps()
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE) as waits:
        pids = enumerate((waits.pid, sleeper.pid))
        ranks = [RankProcess(rank, rank, 0, pid, start_ticks(pid) or 0, 0, 2) for rank, pid in pids]
        opinion = wait_until(lambda: observer.look(True, ranks), bool)
        waits.kill()
    os.close(os.open(pipe, os.O_WRONLY))
    assert opinion
    assert (opinion.ranks, opinion.blind) == ((1,), "")
    assert opinion.quiet_s >= 0.8


SLOW = "import ctypes\nlibc = ctypes.CDLL(None)\nwhile True: libc.usleep(100_000)"


@pytest.mark.needs("bpftrace")
def test_slow_calls_of_a_function(sleeper: subprocess.Popen[str]) -> None:
    """Calls of a function of a library that take long are told with its name, of the ranks that were asked for."""
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line)
    with subprocess.Popen([sys.executable, "-c", SLOW]) as slow:
        try:
            (words,) = map(str, kernel_trace.watch({0: sleeper.pid, 1: slow.pid}, 1.0, [f"{libc}:usleep"]))
        finally:
            slow.kill()
    longest, _, total = words.removeprefix("rank 1 was in usleep for ").partition(" s, ")
    assert 0.1 <= float(longest) < float(total.split()[0]) <= 1.5, words  # a busy machine wakes it late


def test_what_is_no_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that would end up in bpftrace's program as something else is refused; a part that is missing is named."""
    monkeypatch.setattr(kernel_trace, "missing", lambda: None)
    with pytest.raises(UsageError, match="symbol"):
        kernel_trace.watch({0: os.getpid()}, 0.1, ['/lib/x.so:f { system("id") }'])
    monkeypatch.setattr(kernel_trace, "missing", lambda: "bpftrace")
    with pytest.raises(UsageError, match="needs bpftrace"):
        kernel_trace.watch({0: os.getpid()}, 0.1)
