"""The agent under a real torchrun with two ranks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib import metadata
from typing import Any

import pytest

JOB = """
import os, sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.arange(64).float().reshape(16, 4))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
if sys.argv[1] == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2,))
    for layer in model: fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
loader = iter(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False)))
next(loader)
for (x,) in loader:
    model(x).sum().backward(); opt.step(); opt.zero_grad()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # torch 2.15 aborts at interpreter exit in a third of all runs, with an agent and without
"""


def torchrun(rank: Any, kind: str, hooks: tuple[str, ...]) -> list[Any]:
    environment = rank.environment(hooks, (), 0)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        del environment[name]
    (rank.folder / "job.py").write_text(textwrap.dedent(JOB))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "job.py", kind]
    done = subprocess.run(command, env=environment, cwd=rank.folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found: list[Any] = rank.read()
    return found


def torch_version() -> tuple[int, ...]:
    return tuple(map(int, metadata.version("torch").split(".")[:2]))


@pytest.mark.job
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks(rank: Any, kind: str) -> None:
    """Both ranks, and only they, tell their steps, losses, samples and collectives, under DDP and under FSDP2."""
    if kind == "fsdp2" and torch_version() < (2, 6):
        pytest.skip("FSDP2 on the CPU, which torch has from 2.6 on, is missing")
    events = torchrun(rank, kind, ("steps", "loss", "samples", "lr", "checkpoints", "collectives"))
    assert [event for event in events if event.kind.value == "agent.failed"] == []
    assert sorted(event.rank for event in events if event.kind.value == "agent.started") == [0, 1]
    for number in (0, 1):
        steps = [event.data for event in events if event.kind.value == "step" and event.rank == number]
        assert [step["indices"] for step in steps] == [[n, n + 2] for n in range(4 + number, 16, 4)]
        assert all(len(step["losses"]) == 1 for step in steps)
        assert all({"forward", "backward", "optimizer", "collective"} <= step["phases"].keys() for step in steps)
