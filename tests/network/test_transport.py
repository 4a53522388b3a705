"""The transport of a job's collectives. A fault that can't reach it is refused before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from torchaos.harness.interfaces import UsageError
from torchaos.harness.running import capabilities
from torchaos.harness.running.planner import make_plan
from torchaos.harness.running.planner.fault_plans import Machine, transport_of
from torchaos.harness.scenario.loader import load

GPUS = Machine(gpus=2)
FABRIC = Machine(gpus=2, adapters=("mlx5_0",))


@pytest.mark.parametrize(
    ("env", "nodes", "machine", "name", "is_tcp"),
    [
        ({}, 1, Machine(), "loopback and shared memory", False),
        ({}, 2, Machine(), "gloo over TCP", True),
        ({}, 2, Machine(adapters=("mlx5_0",)), "gloo over TCP", True),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, FABRIC, "gloo over TCP", True),
        ({}, 2, GPUS, "NCCL over TCP", True),
        ({}, 2, FABRIC, "NCCL over InfiniBand or RoCE", False),
        ({"NCCL_IB_DISABLE": "1"}, 2, FABRIC, "NCCL over TCP", True),
        ({"NCCL_NET": "Socket"}, 2, FABRIC, "NCCL over TCP", True),
        ({"NCCL_NET": "IB", "NCCL_IB_DISABLE": "0"}, 2, FABRIC, "NCCL over InfiniBand or RoCE", False),
        ({"NCCL_NET": "AWS Libfabric"}, 2, GPUS, "NCCL over AWS Libfabric", False),
        ({}, 2, Machine(gpus=2, plugin="libnccl-net.so"), "NCCL over a plugin's network", False),
        ({"NCCL_NET_PLUGIN": "none"}, 2, Machine(gpus=2, plugin="libnccl-net.so"), "NCCL over TCP", True),
        ({"NCCL_HOSTID": "one"}, 2, GPUS, "NVLink and shared memory", False),
    ],
)
def test_what_collectives_go_over(env: dict[str, str], nodes: int, machine: Machine, name: str, is_tcp: bool) -> None:
    """By what the environment says and what the machine has; whatever is not TCP comes with what would make it so."""
    found = transport_of(env, nodes, machine)
    assert (found.name, found.is_tcp) == (name, is_tcp)
    assert found.why


def _plan(folder: Path, fault: dict[str, object], command: str = "torchrun --nnodes 2 train.py") -> None:
    text = {
        "scenario": "made-up", "launcher": "netns", "assert": ["completed"], "job": {"command": command},
        "faults": [{"when": {"step": 5}, "target": {"node": 0}, **fault}],
    }  # fmt: skip
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(text))
    make_plan(load(path), path, seed=1)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has every tool, two GPUs and InfiniBand."""
    monkeypatch.setattr(capabilities, "check", lambda name: capabilities.Finding(name, True, "", ""))
    monkeypatch.setattr(Machine, "this", lambda: FABRIC)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    for name in ("NCCL_NET", "NCCL_IB_DISABLE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("inject", ["network.delay", "network.loss", "network.bandwidth", "network.link_down"])
def test_what_can_not_reach_them_is_refused(tmp_path: Path, inject: str) -> None:
    """A fault in TCP is no fault to a job whose collectives go over InfiniBand: the error says what to write."""
    with pytest.raises(UsageError, match=rf"{inject} can't reach this job's collectives.*mlx5_0.*NCCL_NET: Socket"):
        _plan(tmp_path, {"inject": inject})


def test_what_does_not_mean_collectives_is_planned(tmp_path: Path) -> None:
    """The rendezvous goes over TCP whatever there is: cutting its port, or names, is planned."""
    _plan(tmp_path, {"inject": "network.partition", "with": {"ports": [29400]}})
    _plan(tmp_path, {"inject": "network.dns"})


def test_one_node_has_no_network(tmp_path: Path) -> None:
    """On one node collectives never leave it."""
    with pytest.raises(UsageError, match=r"loopback and shared memory .*two nodes or more"):
        _plan(tmp_path, {"inject": "network.delay"}, "torchrun --nproc-per-node 2 train.py")
