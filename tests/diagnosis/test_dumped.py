"""Stacks that a rank writes by itself at a signal, without py-spy: real processes that hang in several ways."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import wait_until

from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.diagnosis import live_job
from torchaos.harness.protocol import wire

LISTENS = """
import os
from torchaos.harness.agent.startup import Identity
from torchaos.harness.agent.startup import listen
listen(Identity(0, 0, 1, 1, os.getpid()))
"""
HANGS = {
    "in a sleep": "import time\ndef hangs(): time.sleep(600)",
    "at a lock": "import threading\nlock = threading.Lock(); lock.acquire()\ndef hangs(): lock.acquire()",
    "in a loop": "def hangs():\n    while True: pass",
    "with the interpreter lock": "import ctypes\nlibc = ctypes.PyDLL(None)\ndef hangs():\n    libc.sleep(600); hangs()",
}


@contextmanager
def _rank(folder: Path, code: str) -> Iterator[dict[int, RankProcess]]:
    env = {**os.environ, wire.ENV_PLAN: str(folder / "plan.json")}
    code = f"{code}\nprint(flush=True)\nhangs()\n"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    try:
        assert process.stdout
        process.stdout.readline()
        yield {0: RankProcess(0, 0, 0, process.pid, wire.start_ticks(process.pid) or 0, 1, 1)}
        assert process.poll() is None, "the request must not end a rank"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", HANGS)
def test_a_rank_that_hangs_writes_its_stack(tmp_path: Path, how: str) -> None:
    """Wherever it hangs, also with Python's own lock held; and again at the next request."""
    with _rank(tmp_path, LISTENS + HANGS[how]) as ranks:
        for _ in range(2):
            frames = wait_until(
                lambda: [frame.function for frame in live_job.ask(ranks, tmp_path / "stacks")[0].frames],
                lambda names: names[:1] == ["hangs"],  # it may not have got there at the first request
            )
            assert frames[-1] == "<module>"


def test_a_process_without_the_handler_is_left_alone(tmp_path: Path) -> None:
    """The signal would end it, so it isn't sent; nor to a rank that has a use of its own for the signal."""
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank0-a1-p1.txt").touch()
    with _rank(tmp_path, HANGS["in a sleep"]) as ranks:
        assert live_job.ask(ranks, tmp_path / "stacks") == {}
    own = "import signal\nfrom torchaos.harness.protocol.wire import STACKS_SIGNAL as S\nsignal.signal(S, print)\n"
    with _rank(tmp_path / "own", own + LISTENS + HANGS["in a sleep"]) as ranks:
        assert live_job.ask(ranks, tmp_path / "own" / "stacks") == {}
