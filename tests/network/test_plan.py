"""Plans for several nodes, and scenarios that are refused before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchaos.harness import registry
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import Plan
from torchaos.harness.running import capabilities
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load

REPOSITORY = Path(__file__).parents[2]
SCENARIOS = sorted(
    [*(REPOSITORY / "scenarios/network").glob("*.yaml"), *(REPOSITORY / "scenarios/node").glob("*.yaml")]
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has everything: what is planned does not depend on where the tests run."""
    there = lambda name: capabilities.Finding(name, True, "", "")  # noqa: E731
    monkeypatch.setattr(capabilities, "check", there)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


def plan(folder: Path, fault: dict[str, Any], launcher: str = "netns", **job: Any) -> Plan:
    text = {
        "scenario": "made-up", "launcher": launcher, "assert": ["completed"],
        "faults": [{"when": {"step": 5}, **fault}],
        "job": {"command": "torchrun --nnodes 2 --nproc-per-node 2 train.py", **job},
    }  # fmt: skip
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(text))
    return make_plan(load(path), path, seed=1)


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_every_scenario_of_the_library_can_be_planned(path: Path) -> None:
    """Each names what is registered, with parameters that fit, for two nodes or more."""
    found = make_plan(load(path), path, seed=0)
    assert found.launcher == "netns"
    assert found.job.nodes >= 2
    assert found.scenario == path.stem


def test_a_network_fault_needs_links(tmp_path: Path) -> None:
    """On a launcher without links between nodes it is refused, with what to write instead."""
    with pytest.raises(UsageError, match=r"network.delay needs links between nodes.*write launcher: netns"):
        plan(tmp_path, {"inject": "network.delay", "target": {"node": 1}}, launcher="local")


@pytest.mark.parametrize("target", [{"rank": 1}, {"ranks": [0, 1]}, {"all": True}])
def test_a_node_fault_names_nodes(tmp_path: Path, target: dict[str, Any]) -> None:
    """Ranks are no target of a fault that hits whole nodes."""
    with pytest.raises(UsageError, match=r"node.kill hits whole nodes; write target: \{node: 0\}"):
        plan(tmp_path, {"inject": "node.kill", "target": target})


def test_several_nodes_are_one_target(tmp_path: Path) -> None:
    """`nodes` names some of them; the ranks that are on them are known, and a node that is not there is refused."""
    fault = {"inject": "network.partition", "target": {"nodes": [2, 0]}}
    (planned,) = plan(tmp_path, fault, nodes=3).faults
    assert (planned.target.nodes, planned.target.ranks) == ((0, 2), (0, 1, 4, 5))
    with pytest.raises(UsageError, match="there is no node 2; the job has 2"):
        plan(tmp_path, fault)


def test_a_standby_has_no_rank(tmp_path: Path) -> None:
    """With more nodes than the job uses, the ranks are those of the first ones."""
    (planned,) = plan(tmp_path, {"inject": "node.kill", "target": {"node": 1}}, nodes=3, world_size=2).faults
    assert planned.target.ranks == (1,)
    (planned,) = plan(tmp_path, {"inject": "node.slow", "target": {"node": 2}}, nodes=3, world_size=2).faults
    assert planned.target.ranks == ()


def test_every_fault_of_nodes_is_in_the_library() -> None:
    """No injector of these families that needs no cluster is without a scenario that was run with it."""
    used = {one.inject for path in SCENARIOS for one in load(path).faults}
    known = {
        name for name, injector in registry.injectors().items()
        if name.startswith(("network.", "node.")) and "kubectl" not in injector.needs
    }  # fmt: skip
    assert known - used == set()
