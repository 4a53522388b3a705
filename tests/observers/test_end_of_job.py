"""What the ranks did when the run had to end the job: real processes, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from torchaos.harness.analysis.hangs import ranks_in_words
from torchaos.harness.host import processes
from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.diagnosis import live_job
from torchaos.harness.monitoring.observers import end_of_job
from torchaos.harness.protocol import wire
from torchaos.harness.protocol.collective_stamps import Stamps

TORCH = "/v/site-packages/torch/distributed/distributed_c10d.py"
AGENT = "/v/site-packages/torchaos/harness/agent"
HOOK = ("CollectiveHook._hook.<locals>.collective", f"{AGENT}/collectives/collective_hooks.py")
LIBRARY = "import time\ndef {name}(): time.sleep(600)\n"


@contextmanager
def _ranks(folder: Path, *codes: str, agent: bool = True) -> Iterator[dict[int, RankProcess]]:
    """Processes with libraries where torch has its own, and with the part of the agent that writes stacks."""
    for name, place in (("barrier", "distributed"), ("next_batch", "utils/data"), ("all_reduce", "distributed")):
        library = folder / "site-packages" / "torch" / place / f"{name}.py"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_text(LIBRARY.format(name=name))
    running = []
    for rank, code in enumerate(codes):
        script = folder / f"train{rank}.py"
        listens = f"listen(Identity({rank}, 0, 2, 1, os.getpid()))" if agent else ""
        script.write_text(
            f"import os, sys\ntorch = {str(folder / 'site-packages' / 'torch')!r}\n"
            "sys.path[:0] = [torch + '/distributed', torch + '/utils/data']\n"
            "from torchaos.harness.agent.startup import Identity\nfrom torchaos.harness.agent.startup import listen\n"
            f"import barrier, next_batch, all_reduce\n{listens}\nprint(flush=True)\n{code}\n"
        )
        env = {**os.environ, wire.ENV_PLAN: str(folder / "plan.json")}
        running.append(subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=env))
    try:
        for one in running:
            assert one.stdout
            one.stdout.readline()
        yield {
            rank: RankProcess(rank, rank, 0, one.pid, wire.start_ticks(one.pid) or 0, 1, len(codes))
            for rank, one in enumerate(running)
        }
    finally:
        for one in running:
            one.kill()
            one.communicate()


def _look(ranks: dict[int, RankProcess], folder: Path | None, expected: str) -> dict[str, Any]:
    """Looks until the ranks do what is expected: at the first look, they may not have got there."""
    found: dict[str, Any] = wait_until(
        lambda: end_of_job.look(ranks, folder), lambda found: ranks_in_words(found["ranks"]) == expected
    )
    return found


@pytest.mark.parametrize("py_spy", [True, False])
def test_each_rank_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, py_spy: bool) -> None:
    """What it waits in and which line of the user called it, a loop in Python, and who held up the others; with py-spy
    and with what the agent writes."""
    if py_spy and live_job.find_py_spy() is None:
        pytest.skip("needs py-spy: pip install py-spy")
    if not py_spy:
        monkeypatch.setattr(live_job, "find_py_spy", lambda: None)
    loop = "def train():\n    while True: pass\ntrain()"
    with _ranks(tmp_path, "barrier.barrier()", loop, "next_batch.next_batch()") as ranks:
        found = _look(
            ranks, tmp_path, "rank 0 waits in barrier (train0.py:9), rank 1 is busy in train at train1.py:10, "
            "rank 2 waits in the data loader (train2.py:9)",
        )  # fmt: skip
    assert found["culprits"] == [1, 2]


def test_a_stamp_names_the_collective(tmp_path: Path) -> None:
    """With its number and its group, as all ranks count it."""
    (tmp_path / "stamps").mkdir()
    with _ranks(tmp_path, "barrier.barrier()", "all_reduce.all_reduce()") as ranks:
        made = []
        for rank, op in ((0, "barrier"), (1, "all_reduce")):
            path = tmp_path / "stamps" / f"rank{rank}-a1-p{ranks[rank].pid}.stamps"
            made.append(Stamps(path, rank, 1, ranks[rank].pid))
            made[-1].begin(op, made[-1].group(str(rank), [0, 1]), 8, 0)
        words = "rank 0 waits in barrier 1 of group 0 (train0.py:9), rank 1 in all_reduce 1 of group 1 (train1.py:9)"
        _look(ranks, tmp_path, words)
    for stamps in made:
        stamps.close()


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ([("barrier", TORCH), ("_exception_logger.<locals>.wrapper", TORCH), HOOK], "in barrier (train.py:7)"),
        ([("wait", "/usr/lib/python3.11/threading.py")], "in wait (train.py:7)"),
        ([("f", "/v/site-packages/torch/a.py"), ("_find_and_load", "<frozen importlib._bootstrap>")],
         "in an import (train.py:7)"),
        ([], "in train.py:7"),
    ],
)  # fmt: skip
def test_what_the_user_s_line_called(inner: list[tuple[str, str]], words: str) -> None:
    """The function that it called, without wrappers of torch and hooks of our agent."""
    frames = [live_job.Frame(function, file, 1) for function, file in inner]
    stack = live_job.Stack(1, (*frames, live_job.Frame("<module>", "/job/train.py", 7)))
    assert end_of_job._where(stack, None) == words


def test_what_could_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without py-spy and agent there are no stacks; a stopped rank is seen all the same."""
    monkeypatch.setattr(live_job, "find_py_spy", lambda: None)
    with _ranks(tmp_path, "barrier.barrier()", "barrier.barrier()", agent=False) as ranks:
        os.kill(ranks[1].pid, signal.SIGSTOP)
        wait_until(lambda: (now := processes.stat(ranks[1].pid)) and now.state == "T")
        found = _look(ranks, None, "rank 0 waits, rank 1 is stopped")
    assert found["culprits"] == [1]
    assert any("the stacks of ranks 0, 1 could not be had" in text for text in found["problems"])
