"""The culprits in a live job, from stacks and states alone: real processes, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import wait_until

from torchaos.harness.host import processes
from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.diagnosis import live_job
from torchaos.harness.monitoring.diagnosis.live_job import find_py_spy
from torchaos.harness.protocol.wire import start_ticks

LIBRARY = "import time\ndef all_reduce(seconds): time.sleep(seconds)\n"
FOREVER = "def train(): time.sleep(600)\ntrain()"
WAITS = "collectives.all_reduce(600)"
TURNS = """
def train(): time.sleep(0.15)
def step():
    collectives.all_reduce(0.12)
    train()
    collectives.all_reduce(0.05)
while True: step()
"""
pytestmark = pytest.mark.skipif(find_py_spy() is None, reason="needs py-spy: pip install py-spy")


@contextmanager
def _ranks(folder: Path, *codes: str) -> Iterator[dict[int, RankProcess]]:
    """Processes whose collectives lie where torch has its own; all of them run their code when it is entered."""
    library = folder / "torch" / "distributed" / "collectives.py"
    library.parent.mkdir(parents=True)
    library.write_text(LIBRARY)
    running = []
    for number, code in enumerate(codes):
        script = folder / f"train{number}.py"
        script.write_text(f"import sys, time\nsys.path[:0] = [{str(library.parent)!r}]\nimport collectives\n"
                          f"print(flush=True)\n{code}\n")  # fmt: skip
        running.append(subprocess.Popen([sys.executable, "-S", str(script)], stdout=subprocess.PIPE))
    try:
        for one in running:
            assert one.stdout
            one.stdout.readline()
        yield {
            rank: RankProcess(rank, rank, 0, one.pid, start_ticks(one.pid) or 0, 0, len(codes))
            for rank, one in enumerate(running)
        }
    finally:
        for one in running:
            one.kill()
            one.communicate()


def test_one_that_never_comes_is_named(tmp_path: Path) -> None:
    """It stays in its own code while the other stays in a collective."""
    with _ranks(tmp_path, WAITS, FOREVER) as ranks:
        found = live_job.diagnose(ranks)
    assert found.culprits == {1}
    assert "train" in found.evidence[1][0]


def test_a_broken_network_explains_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks that a partition cuts apart, one may have got the last data and gone on to the next collective:
    nobody is to blame."""
    with _ranks(tmp_path, WAITS, FOREVER) as ranks:
        socket = f'ESTAB 0 500 10.0.0.1:40 10.0.0.2:50 users:(("python",pid={ranks[1].pid},fd=7))'
        (tmp_path / "ss").write_text(f"#!/bin/sh\ncat <<'END'\n{socket}\n\t rto:800 backoff:2 unacked:1\nEND\n")
        (tmp_path / "ss").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        found = live_job.diagnose(ranks, hangs=True)
    assert (found.culprits, found.suspects) == (set(), {0, 1})
    assert any("does not arrive" in text for text in found.problems)


def test_a_job_that_goes_on_has_no_culprit(tmp_path: Path) -> None:
    """At any one moment some rank of a healthy job waits for another; not for long, though."""
    with _ranks(tmp_path, TURNS, f"time.sleep(0.15)\n{TURNS}") as ranks:
        for _ in range(3):
            found = live_job.diagnose(ranks)
            assert found.culprits == set(), found.lines()


def test_one_that_is_stopped_is_named(tmp_path: Path) -> None:
    """Whatever its stack says."""
    with _ranks(tmp_path, WAITS, WAITS) as ranks:
        os.kill(ranks[0].pid, signal.SIGSTOP)
        wait_until(lambda: (found := processes.stat(ranks[0].pid)) and found.state == "T")
        assert live_job.diagnose(ranks).culprits == {0}
