"""Faults of nodes and of their GPUs, on two or three nodes of this machine: they hit the right ranks."""

from __future__ import annotations

import pytest
import yaml
from chaos import REPOSITORY, RunScenario

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.events.journal import read_events

pytestmark = [pytest.mark.job, pytest.mark.long, pytest.mark.timeout(400), pytest.mark.needs("links")]


def test_a_standby_takes_over(torchaos: RunScenario) -> None:
    """Node 1 has rank 1, since the standby was started later; after its death the standby, node 2, has that rank."""
    run = torchaos(REPOSITORY / "scenarios/node/standby.yaml")
    assert run.exit_code == 0, run
    assert run.result["faults"][0]["target"] == "node 1 (rank 1)"
    ups = {(e.attempt, e.rank): e.data["node"] for e in read_events(run.folder / "events") if e.kind is Kind.RANK_UP}
    assert [ups[0, rank] for rank in (0, 1)] == [0, 1]
    last = max(attempt or 0 for attempt, _rank in ups)
    assert {ups[last, rank] for rank in (0, 1)} == {0, 2}


def test_a_gpu_of_one_node_is_no_other_nodes_gpu(torchaos: RunScenario) -> None:
    """Each node has a GPU 0. An ECC error of rank 1's, on node 1, is told there alone: node 0's agent tells nobody."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed, by which the health agent watches")
    scenario = yaml.safe_load((REPOSITORY / "scenarios/gpu/ecc-double-bit.yaml").read_text())
    command = scenario["job"]["command"].replace("--nproc-per-node 2", "--nnodes 2 --nproc-per-node 1")
    command = command.replace("--max-restarts 0", "--max-restarts 3")  # no node has a spare GPU
    env = {**scenario["job"]["env"], "TORCHAOS_NVML_GPUS": "1"}
    del env["CUDA_VISIBLE_DEVICES"]
    scenario["faults"][0]["for"] = "4s"
    scenario |= {"launcher": "netns", "twin": "none", "job": {**scenario["job"], "command": command, "env": env}}
    scenario["job"] |= {"nodes": 2, "world_size": 2}
    scenario["assert"] = [{"health_reaction": {"noticed": "5s", "drained": "60s"}}, {"completed": {"steps": 60}}]
    run = torchaos(scenario)
    assert run.exit_code == 0, run
    told = [e.data for e in read_events(run.folder / "events") if e.kind is Kind.EFFECT and "served_to" in e.data]
    assert {effect["node"] for effect in told} == {1}
    logs = {path.name: path.read_text() for path in (run.folder / "logs").glob("*.log")}
    assert "telling 1 ranks to leave" in logs["job-0.node1.log"]
    assert "ranks to leave" not in logs["job-0.log"]
