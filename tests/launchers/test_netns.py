"""A job on two nodes, each a network namespace: which ranks are where, what restarts, and what is left."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError, JobSpec
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running.launchers.job import job_env
from torchaos.harness.running.launchers.local import Netns, keepers
from torchaos.harness.running.launchers.local_job import LocalJob

pytestmark = [pytest.mark.job, pytest.mark.needs("links")]
TRAINER = Path(__file__).parent / "trainers" / "linger.py"


class Nodes:
    def __init__(self, folder: Path, *command: str) -> None:
        self.folder, self.run_id = folder, f"netns-{uuid.uuid4().hex}"
        for name in ("events", "logs"):
            (folder / name).mkdir()
        self.journal = Journal(folder / "events")
        plan = folder / "plan.json"
        AgentPlan(self.run_id, str(folder / "events"), ("steps",)).write(plan)
        argv = (
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "2",
            str(TRAINER), str(folder), "--all-reduce",
        )  # fmt: skip
        extra = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        extra["PET_RDZV_CONF"] = "keep_alive_interval=1,keep_alive_max_attempt=3"  # a dead node is missed sooner
        env = job_env(os.environ, run_id=self.run_id, agent_plan=plan, extra=extra)
        spec = JobSpec(command or argv, folder, env, folder / "logs" / "job-0.log", 0, 2)
        self.job = LocalJob(lambda _: spec, Netns(), self.journal, record_undo=lambda resources, submission: None)

    def wait(self, look: Any, fits: Any = bool, timeout_s: float = 90.0) -> Any:
        return wait_until(look, fits, timeout_s, lambda: f"{look()!r}; the logs say: {self.logs()[-3000:]}")

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "logs").iterdir()))

    def ranks(self, attempt: int) -> Any:
        ups = [self.folder / f"up-{rank}-{attempt}" for rank in (0, 1)]
        self.wait(lambda: [path.exists() for path in ups], all)
        return self.wait(self.job.ranks, lambda found: [one.attempt for one in found.values()] == [attempt] * 2)

    def close(self) -> None:
        self.job.stop()
        JobProcesses(keepers(self.run_id)).undo()
        self.journal.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    one = Nodes(tmp_path)
    yield one
    one.close()


def test_a_node_that_dies_and_comes_back(nodes: Nodes) -> None:
    """Ranks are told with their node; a node that is killed and started again makes both ranks attempt 1, although each
    torchelastic agent counts for itself; each node has its own log and exit code, and the job's is 0."""
    nodes.job.start()
    first = nodes.ranks(0)
    assert {rank: one.node for rank, one in first.items()} == {0: 0, 1: 1}
    live = nodes.job.nodes()
    assert first[0].pid in live[0].processes()
    assert not live[0].processes().keys() & live[1].processes().keys()
    assert nodes.job.agents([1])[0].pid in live[1].processes()
    with pytest.raises(ChaosError, match="still there"):
        live[1].start_again()

    live[1].keep_place()
    assert processes.kill(live[1].processes(), time.monotonic() + 30) == []
    gone = nodes.wait(lambda: [e for e in nodes.journal.snapshot() if e.kind is Kind.NODE_EXITED])
    assert [(event.data["node"], event.data["exit_code"]) for event in gone] == [(1, -9)]
    live[1].start_again()
    second = nodes.ranks(1)
    assert {rank: one.node for rank, one in second.items()} == {0: 0, 1: 1}
    assert nodes.job.agents([1])[0].pid in live[1].processes()

    (nodes.folder / "go-1").touch()
    assert nodes.job.wait(400.0) == 0  # torchelastic agents wait for each other at the end, for at most 300 s
    events = nodes.journal.snapshot()
    assert sum(event.kind is Kind.JOB_EXITED for event in events) == 1
    assert {e.attempt for e in events if e.kind is Kind.ELASTIC_WORKER and e.data["state"] == "START"} == {0, 1}
    assert sorted(path.name for path in (nodes.folder / "logs").iterdir()) == ["job-0.log", "job-0.node1.log"]
    assert nodes.job.stop() == []
    assert nodes.job.nodes()[0].processes() == {}


def test_every_node_has_a_log_and_an_exit_code(tmp_path: Path) -> None:
    """Of a command that made no rank, the exit code is the first of a node that is not 0; it comes once, after the
    last node's, and each node's environment and output are its own."""
    script = "echo I am $TORCHAOS_NODE of $PET_NNODES, $(hostname), $PET_LOCAL_ADDR; exit $((3 * TORCHAOS_NODE))"
    nodes = Nodes(tmp_path, "/bin/sh", "-c", script)
    try:
        nodes.job.start()
        assert nodes.job.wait(30.0) == 3
        exits = [e for e in nodes.journal.snapshot() if e.kind in (Kind.NODE_EXITED, Kind.JOB_EXITED)]
        assert sorted((e.data["node"], e.data["exit_code"]) for e in exits[:2]) == [(0, 0), (1, 3)]
        assert [(e.kind, e.data["exit_code"]) for e in exits[2:]] == [(Kind.JOB_EXITED, 3)]
        logs = tmp_path / "logs"
        assert (logs / "job-0.log").read_text() == "I am 0 of 2, node000, node000\n"
        assert (logs / "job-0.node1.log").read_text() == "I am 1 of 2, node001, node001\n"
    finally:
        nodes.close()
