"""A job loses a node; its nodes use an etcd for the rendezvous, which the launcher starts for them."""

from __future__ import annotations

import pytest
import yaml
from chaos import REPOSITORY, RunScenario


@pytest.mark.job
@pytest.mark.needs("links", "etcd")
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["etcd-v2", "etcd"])
def test_a_job_outlives_its_first_node(backend: str, torchaos: RunScenario) -> None:
    """With c10d the rendezvous would die with that node. In etcd it does not: the other node goes on in the same
    submission, which is attempt 1 by both of torch's ways to use etcd, and consumes each sample once."""
    scenario = yaml.safe_load((REPOSITORY / "scenarios/node/kill-first-node-etcd.yaml").read_text())
    scenario["job"]["command"] = scenario["job"]["command"].replace("etcd-v2", backend)
    run = torchaos(scenario)
    assert run.exit_code == 0, run
    assert run.result["attempts"] == 2
    (fault,) = run.result["faults"]
    assert fault["evidence"]
