"""Runs a training job under torchrun, and kills one of its ranks at a time that is visible from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 300.0
Moment = Callable[[str, Path], bool]


@dataclass(frozen=True)
class Ran:
    """How a job ended, and what it said."""

    exit_code: int
    log: str
    folder: Path

    @property
    def losses(self) -> list[tuple[int, str]]:
        return [(int(step), loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", self.log)]

    @property
    def rates(self) -> dict[int, str]:
        return {int(step): lr for step, lr in re.findall(r"step (\d+) loss \S+ lr (\S+)", self.log)}

    @property
    def starts(self) -> list[int]:
        """How many steps each attempt found done."""
        return [int(steps) for steps in re.findall(r"(\d+) of \d+ steps done", self.log)]

    def restarted_right(self, every: int) -> bool:
        """Whether the second attempt went on from the newest checkpoint at the time of the kill, however late that was;
        or from the one before, because a thread writes the newest while the job trains on."""
        logged = re.findall(r"step (\d+) loss", self.log.split("steps done")[1])
        newest = int(logged[-1]) // every * every if logged else 0
        return self.starts in ([0, newest], [0, max(newest - every, 0)])

    @property
    def checkpoints(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


def ranks_of(torchrun: int) -> dict[int, psutil.Process]:
    ranks = {}
    for process in psutil.Process(torchrun).children():
        try:
            ranks[int(process.environ()["RANK"])] = process
        except (psutil.Error, KeyError):  # gone, or not one yet
            continue
    return ranks


def run(
    script: str, folder: Path, *options: str, ranks: int = 2, signum: int = signal.SIGKILL, when: Moment | None = None
) -> Ran:
    """Run `script`, with its checkpoints in `folder`. Rank 1 gets the signal once, when `when(log, folder)` holds."""
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "2"]
    log = folder.with_suffix(".log")
    with open(log, "w") as output:
        job = subprocess.Popen([*torchrun, str(REPOSITORY / script), *options], stdout=output, stderr=output, env=env)
    deadline = time.monotonic() + LIMIT_S
    try:
        while job.poll() is None:
            assert time.monotonic() < deadline, f"still running after {LIMIT_S:g} s:\n{log.read_text()}"
            if when is not None and when(log.read_text(), folder) and 1 in (found := ranks_of(job.pid)):
                found[1].send_signal(signum)
                when = None
            time.sleep(0.02)
    finally:
        if job.poll() is None:
            for child in psutil.Process(job.pid).children(recursive=True):
                child.kill()
            job.kill()
            job.wait()
    assert when is None, f"the moment to send the signal never came:\n{log.read_text()}"
    return Ran(job.returncode, log.read_text(), folder)


@pytest.fixture(scope="session")
def run_job() -> Callable[..., Ran]:
    """Runs a script with its own options, see `run`."""
    return run


@pytest.fixture(scope="session")
def gpt() -> Callable[..., Ran]:
    """Runs the reference job ("ddp", "fsdp2", or a script) for 24 steps with a checkpoint every 8."""

    def start(form: str, folder: Path, **more: Any) -> Ran:
        script = form if "/" in form else f"scenarios/jobs/gpt_{form}.py"
        options = ["--steps", "24", "--checkpoint-every", "8", "--checkpoint-dir", str(folder)]
        return run(script, folder, *options, **more)

    return start


@pytest.fixture(scope="session")
def unfaulted(gpt: Callable[..., Ran], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """The run of "ddp" or "fsdp2" that nothing happened to; each is made once."""
    made: dict[str, Ran] = {}

    def get(form: str) -> Ran:
        if form not in made:
            made[form] = gpt(form, tmp_path_factory.mktemp(form) / "run")
            assert made[form].exit_code == 0, made[form].log
        return made[form]

    return get


@pytest.fixture(scope="session")
def bitwise() -> Callable[[Ran, Ran], None]:
    """Asserts that a run and an unfaulted one have equal losses."""

    def check(ran: Ran, reference: Ran) -> None:
        expected = dict(reference.losses)
        wrong = [(step, loss, expected.get(step)) for step, loss in ran.losses if expected.get(step) != loss]
        assert not wrong, f"(step, loss, loss without fault): {wrong}"
        assert max(dict(ran.losses)) == max(expected), ran.log

    return check


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test import the modules of scenarios/jobs by the names that the jobs import them by."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scenarios" / "jobs"))
