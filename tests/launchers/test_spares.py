"""Standby nodes: they are started when all ranks are up, so that none of them takes a place at first."""

from __future__ import annotations

import os
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from torchaos.harness.interfaces import ChaosError, Handle, JobSpec, Launcher
from torchaos.harness.protocol.wire import ENV_NODE, Kind
from torchaos.harness.running.launchers.job import job_env
from torchaos.harness.running.launchers.local import LocalNode
from torchaos.harness.running.launchers.local_job import LocalJob
from torchaos.harness.running.planner.fault_plans import FaultAt, target_of
from torchaos.harness.running.planner.job_plan import planned_job
from torchaos.harness.scenario.grammar import Fault, Limits, When
from torchaos.harness.scenario.grammar import Job as Grammar
from torchaos.harness.scenario.grammar import Target as Aim

Bench = Any  # of conftest.py, which tests can't import

# In place of torchrun on one of three nodes: where it has a rank, it starts one, once it is let.
NODE = """
import os, subprocess, sys, time
folder, node = sys.argv[1], int(os.environ["TORCHAOS_NODE"])
def wait_for(name):
    while not os.path.exists(folder + "/" + name): time.sleep(0.01)
if node < 2:
    wait_for("start-%d" % node)
    if os.path.exists(folder + "/die-%d" % node): sys.exit(3)
    rank = {"RANK": str(node), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_RESTART_COUNT": "0"}
    loop = "import os, sys, time\\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    sys.exit(subprocess.call([sys.executable, "-S", "-c", loop, folder + "/go"], env={**os.environ, **rank}))
wait_for("go")
"""


class Three(Launcher):
    name: ClassVar[str] = "three"

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        return ()

    def create(self, spec: JobSpec) -> Sequence[LocalNode]:
        return [LocalNode(index, {ENV_NODE: str(index)}) for index in range(3)]


@pytest.fixture
def job(bench: Bench) -> LocalJob:
    def spec_for(submission: int) -> JobSpec:
        env = job_env(os.environ, run_id=bench.run_id, agent_plan=None)
        argv = (sys.executable, "-S", "-c", NODE, str(bench.folder))
        return JobSpec(argv, bench.folder, env, bench.folder / f"job-{submission}.log", submission, 3, busy_nodes=2)

    made = LocalJob(spec_for, Three(), bench.journal)
    bench.jobs.append(made)
    made.start()
    return made


def started(bench: Bench) -> list[int]:
    return [event.data["node"] for event in bench.events(Kind.NODE_STARTED)]


def let(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def test_a_standby_starts_when_the_ranks_are_up(bench: Bench, job: LocalJob) -> None:
    """One rank is not enough; it is a node of the job from the start, but has nothing that could be hit or started
    again."""
    let(bench.folder, "start-0")
    bench.event(Kind.RANK_UP)
    assert started(bench) == [0, 1]
    spare = job.nodes()[2]
    assert (spare.node.index, spare.processes()) == (2, {})
    with pytest.raises(ChaosError, match="was not started yet"):
        spare.start_again()
    let(bench.folder, "start-1")
    up = bench.event(Kind.NODE_STARTED, node=2)
    assert all(event.mono_s < up.mono_s for event in bench.events(Kind.RANK_UP))
    assert len(bench.events(Kind.RANK_UP)) == 2
    let(bench.folder, "go")
    assert job.wait(300) == 0


def test_a_standby_takes_the_place_of_a_node_that_ends_before(bench: Bench, job: LocalJob) -> None:
    """Nobody waits for ranks that will not come up without it."""
    let(bench.folder, "die-0", "start-0")
    bench.event(Kind.NODE_EXITED, node=0, exit_code=3)
    bench.event(Kind.NODE_STARTED, node=2)
    let(bench.folder, "start-1", "go")
    assert job.wait(300) is not None


@pytest.mark.parametrize(
    ("command", "nodes", "ranks"),
    [
        ("--nnodes 2:2 --nproc-per-node 1", (3, 2), {0: (0,), 1: (1,), 2: ()}),
        ("--nnodes 2 --nproc-per-node 2", (3, 2), {0: (0, 1), 1: (2, 3), 2: ()}),
        ("--nnodes 1:3 --nproc-per-node 1", (3, 0), {0: (0,), 2: (2,)}),
        ("--nnodes 1:2 --nproc-per-node 1", (3, 2), {0: (0,), 1: (1,), 2: ()}),
    ],
)
def test_which_nodes_are_spare(
    tmp_path: Path, command: str, nodes: tuple[int, int], ranks: dict[int, tuple[int, ...]]
) -> None:
    """Those beyond the most that the command lets in: they have no rank at first."""
    (tmp_path / "train.py").touch()
    many, busy = nodes
    world = sum(len(some) for some in ranks.values()) if busy else many
    job = Grammar(
        command=f"{shlex.quote(sys.executable)} -m torch.distributed.run {command} train.py",
        nodes=many,
        world_size=world,
    )
    planned = planned_job(job, tmp_path, None)
    assert planned.busy_nodes == busy
    for node, expected in ranks.items():
        fault = Fault(inject="node.kill", target=Aim(node=node), when=When(step=3))
        assert (
            target_of(fault, planned, Limits(), random.Random(1), FaultAt(tmp_path / "s.yaml", 0, fault)).ranks
            == expected
        )
