"""Jobs that the tests start themselves, and waiting on conditions."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import waiting

from torchaos.harness.host import processes
from torchaos.harness.interfaces import JobSpec, RankProcess
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.running.launchers.job import RunningJob, job_env
from torchaos.harness.running.launchers.local import Local
from torchaos.harness.running.launchers.local_job import LocalJob

T = TypeVar("T")


class Bench:
    """A folder, a journal, and jobs that are ended with the test."""

    trainers = Path(__file__).parent / "trainers"

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_id = folder, f"test-{uuid.uuid4().hex}"
        (folder / "events").mkdir()
        self.journal = Journal(folder / "events")
        self.jobs: list[LocalJob] = []

    wait_until = staticmethod(waiting.wait_until)

    @staticmethod
    def torchrun(*arguments: str, max_restarts: int = 0) -> tuple[str, ...]:
        launcher = (sys.executable, "-m", "torch.distributed.run")
        return (*launcher, "--nproc-per-node", "2", "--max-restarts", str(max_restarts), *arguments)

    def job(self, *argv: str, env: dict[str, str] | None = None, **options: Any) -> LocalJob:
        def spec_for(submission: int) -> JobSpec:
            extra = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", **(env or {})}
            whole = job_env(os.environ, run_id=self.run_id, agent_plan=None, extra=extra)
            return JobSpec(argv, self.folder, whole, self.folder / f"job-{submission}.log", submission)

        job = LocalJob(spec_for, Local(), self.journal, **options)
        self.jobs.append(job)
        return job

    def linger(self, *options: str, max_restarts: int = 0, **more: Any) -> LocalJob:
        """A started job of two ranks that wait for `go`."""
        command = self.torchrun(str(self.trainers / "linger.py"), str(self.folder), *options, max_restarts=max_restarts)
        job = self.job(*command, **more)
        job.start()
        return job

    def ranks(self, job: RunningJob, attempt: int = 0) -> dict[int, RankProcess]:
        """Both ranks of the attempt, once each of them is in its loop and known to the job."""
        self.wait_until(lambda: all(self.up(rank, attempt).exists() for rank in (0, 1)))
        found: dict[int, RankProcess] = self.wait_until(
            job.ranks, lambda found: [one.attempt for one in found.values()] == [attempt, attempt]
        )
        return found

    def up(self, rank: int, attempt: int = 0) -> Path:
        return self.folder / f"up-{rank}-{attempt}"

    def go(self, attempt: int = 0) -> None:
        (self.folder / f"go-{attempt}").touch()

    def events(self, *kinds: Kind) -> list[Event]:
        return sorted((e for e in self.journal.snapshot() if e.kind in kinds), key=lambda event: event.mono_s)

    def event(self, kind: Kind, **data: Any) -> Event:
        """The first event of the kind with this payload, once there is one."""
        found: Event = self.wait_until(
            lambda: next((e for e in self.events(kind) if data.items() <= dict(e.data).items()), None)
        )
        return found

    def left(self) -> dict[int, int]:
        return processes.family(self.run_id)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for job in bench.jobs:
        job.stop()
    bench.journal.close()


@pytest.fixture
def stranger() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes in a session of their own that are nobody's job; all are ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(argv, start_new_session=True, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
