"""The check sums of the parameters that the agent reports when a save begins."""

from __future__ import annotations

from typing import Any

PREPARE = """
import os, threading, torch
folder = os.environ["FOLDER"]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1).bfloat16())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    model[1](model[0](torch.ones(1, 4)).bfloat16()).sum().backward(); opt.step(); opt.zero_grad()
def sums():
    kinds = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    for name, one in model.named_parameters():
        print("sum", name, f"{int(one.detach().view(kinds[one.dtype]).sum(dtype=torch.int64)) % 2**64:016x}")
step()
"""


def _told(ran: Any) -> list[dict[str, list[str]]]:
    return [event.data["parameters"] for event in ran.of("checkpoint.parameters")]


def test_each_save_tells_what_is_in_memory(rank: Any) -> None:
    """Name, type, shape and sum of each parameter, whatever wraps the model; again only where something changed."""
    ran = rank.run(
        PREPARE
        + """
sums()
wrapped = torch.nn.Sequential(); wrapped.module = model
torch.save({}, folder + "/a.pt")
torch.save({}, folder + "/b.pt")
model[0].bias.data.zero_()
torch.save({}, folder + "/c.pt")
step()
torch.save({}, folder + "/d.pt")
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    told = _told(ran)
    assert [event.step for event in ran.of("checkpoint.parameters")] == [1, 1, 2]
    printed = dict(line.split()[1:] for line in ran.output.splitlines() if line.startswith("sum"))
    kinds = {"0.weight": "float32 2x4", "0.bias": "float32 2", "1.weight": "bfloat16 1x2", "1.bias": "bfloat16 1"}
    assert told[0] == {name: [kinds[name], printed[name]] for name in kinds}
    assert {name for name in kinds if told[1][name] != told[0][name]} == {"0.bias"}
    assert told[1]["0.bias"][1] == "0" * 16
    assert "kept" not in ran.of("agent.ended")[0].data["unseen"]


def test_what_a_thread_saves_is_not_told_of(rank: Any) -> None:
    """It saves a copy of an earlier time. Nor does it cost anything where nobody asked for it."""
    save = """
one = threading.Thread(target=torch.save, args=({}, folder + "/a.pt")); one.start(); one.join()
"""
    assert _told(rank.run(PREPARE + save, hooks=("steps", "checkpoints", "kept"))) == []
    assert _told(rank.run(PREPARE + "torch.save({}, folder + '/a.pt')", hooks=("steps", "checkpoints"))) == []


def test_names_that_two_parameters_have_are_left_out(rank: Any) -> None:
    """Two models of one shape, as of a generator and a critic: nobody knows which is which in a checkpoint."""
    ran = rank.run(
        PREPARE
        + """
other = torch.nn.ModuleList([torch.nn.Linear(4, 2)])
more = torch.optim.SGD(other.parameters(), lr=0.01)
torch.save({}, folder + "/a.pt")
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    assert [sorted(one) for one in _told(ran)] == [["1.bias", "1.weight"]]


def test_a_shard_tells_its_part(rank: Any) -> None:
    """Under FSDP2 a parameter has the shape of the whole and the sum of this rank's part, which adds up."""
    ran = rank.run(
        """
import os, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    print("without"); raise SystemExit
folder = os.environ["FOLDER"]
dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=0, world_size=1)
model = torch.nn.Linear(4, 2)
whole = int(model.weight.detach().view(torch.int32).sum(dtype=torch.int64)) % 2**64
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
torch.save({}, folder + "/a.pt")
print("sum", f"{whole:016x}")
dist.destroy_process_group()
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    if "without" not in ran.output:  # torch before 2.6
        told = _told(ran)[0]["weight"]
        assert told == ["float32 2x4", "shard-" + ran.output.partition("sum ")[2].split()[0]]
