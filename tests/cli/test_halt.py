"""`torchaos halt` names what it ends. The runs are processes of these tests, in a state directory of their own."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_until
from warm import torchaos

AT_WORK = """
import signal, sys
from torchaos.harness.running.housekeeping import at_work
with at_work(sys.argv[1:]):
    print("up", flush=True)
    signal.pause()
"""
TELLS = """
import signal, time
from torchaos.harness.cli.run import signals
from torchaos.harness.running.housekeeping import at_work
with at_work(["kill-rank"]), signals() as interrupted:
    print("up", flush=True)
    while not interrupted.reason:
        time.sleep(0.01)
    print(interrupted.reason)
"""
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Starts a command that is at work on scenarios of these names."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    started: list[subprocess.Popen[str]] = []

    def start(*names: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", AT_WORK, *names], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def halt(*words: str, answer: str | None = None) -> tuple[int, str]:
    """Exit code and output. `answer`: typed on a terminal; None: there is no terminal."""
    if answer is None:
        done = torchaos("halt", *words)
        return done.returncode, done.stdout + done.stderr
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    done = torchaos("halt", *words, stdin=theirs)
    os.close(ours)
    os.close(theirs)
    return done.returncode, done.stdout + done.stderr


def test_without_a_name_it_ends_nothing_unasked(begin: Begin) -> None:
    """A script that names no run gets the list, and exit code 3; on a terminal it asks, and no is no."""
    one, two = begin("kill-rank"), begin("cut-link", "slow-disk")
    code, said = halt()
    assert code == 3
    alive = f"kill-rank ({one.pid}), cut-link, slow-disk ({two.pid})"
    assert said == f"error: which runs are to end? name them, or write --yes for all; alive: {alive}\n"
    code, said = halt(answer="n\n")
    assert (code, "End these 2 runs, with rollback? [y/N]" in said) == (2, True)
    assert (one.poll(), two.poll()) == (None, None)
    assert halt(answer="y\n")[0] == 0
    wait_until(lambda: (one.poll(), two.poll()), lambda codes: None not in codes)


def test_only_what_is_named_ends(begin: Begin) -> None:
    """By its scenario or by the pid of its harness; a name that no run has is told, with the runs that there are."""
    one, two, three = begin("kill-rank"), begin("cut-link"), begin("slow-disk")
    code, said = halt("kil-rank")
    assert (code, "kil-rank: no run that is alive has this name" in said, "cut-link" in said) == (3, True, True)
    code, said = halt("kill-rank", str(two.pid))
    assert (code, said) == (0, "ended: kill-rank, cut-link\n")
    wait_until(lambda: (one.poll(), two.poll()), lambda codes: None not in codes)
    assert three.poll() is None
    assert halt("--yes") == (0, "ended: slow-disk\n")
    wait_until(three.poll, lambda code: code is not None)
    assert halt() == (0, "no run was alive\n"), "there is nothing to ask"


def test_a_run_says_what_ended_it(begin: Begin) -> None:
    """A signal does not show its sender, and a run that `torchaos halt` ended says so; other signals by their names.
    Without a terminal, nobody can have pressed Ctrl-C."""
    told = []
    for number in (None, signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen([sys.executable, "-c", TELLS], stdout=subprocess.PIPE, text=True,
                                   start_new_session=True)  # fmt: skip
        try:
            assert process.stdout
            assert process.stdout.readline() == "up\n"
            if number is None:
                assert halt("kill-rank") == (0, "ended: kill-rank\n")
            else:
                process.send_signal(number)
            told.append(process.communicate(timeout=60)[0])
        finally:
            process.kill()
            process.communicate()
    assert told == ["torchaos halt ended it\n", "SIGTERM ended it\n", "SIGINT ended it\n"]
