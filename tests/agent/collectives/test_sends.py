"""Sends and recvs in real ranks: they are stamped, a send with the number of its recv, and stalled if they are asked
for."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STALL = Path(__file__).parents[3] / "injectors" / "waiting.py"
STAGES = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), 2, is_master=not rank)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
x, taken = torch.ones(4), torch.zeros(4)
for n in range(3):
    opt.zero_grad(); model(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        dist.send(x, 1); dist.recv(taken, 1)
    else:
        dist.recv(taken, 0); dist.isend(x, 0).wait()
    dist.all_reduce(x)
    opt.step()
last = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, taken, 1 - rank)]
for one in dist.batch_isend_irecv(last): one.wait()
other = dist.new_group([0, 1])
dist.send(x, 1, group=other) if rank == 0 else dist.recv(taken, 0, group=other)
dist.barrier()
os._exit(0)
"""


def _run(rank: Any, **more: Any) -> list[Any]:
    """What two ranks did that give each other something in each of three steps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = [{"RANK": str(number), "PORT": port} for number in (0, 1)]
    hooks = ("steps", "collectives", "stamps")
    ranks = [rank.start(STAGES, hooks=hooks, env=one, **more) for one in env]
    ran = [rank.wait(one) for one in ranks]
    assert [one.code for one in ran] == [0, 0], [one.output for one in ran]
    return ran


def test_a_send_has_the_number_of_its_recv(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """Those of one direction and group are counted for themselves, and the collectives as if there were none. However
    they are called, they have ended when the job has waited for them."""
    _run(rank)
    found = agent_module("protocol.collective_stamps").read_folder(rank.folder / "stamps")
    assert len(found) == 2
    for stamps in found:
        own = stamps[0].rank
        (apart,) = (stamp for stamp in stamps if stamp.op in ("send", "recv") and not stamp.group.startswith("0 "))
        assert (apart.op, apart.pair, apart.seq) == (("send", "recv")[own], (0, 1), 1)
        told = [(stamp.op, stamp.pair, stamp.seq) for stamp in stamps if stamp is not apart]
        sends = [(op, pair, seq) for op, pair, seq in told if op == "send"]
        recvs = [(op, pair, seq) for op, pair, seq in told if op == "recv"]
        assert sends == [("send", (own, 1 - own), number) for number in (1, 2, 3, 4)]
        assert recvs == [("recv", (1 - own, own), number) for number in (1, 2, 3, 4)]
        assert [(op, seq) for op, pair, seq in told if pair is None] == [
            ("all_reduce", 1), ("all_reduce", 2), ("all_reduce", 3), ("barrier", 4),
        ]  # fmt: skip
        assert not any(stamp.open for stamp in stamps[:-1])
        assert stamps[0].name == f"{stamps[0].op} 1 from rank 0 to rank 1 of group 0"


def _trigger(rank: Any, step: int, operation: str | None) -> Any:
    """A trigger for a stall of 0.3 s in that step, armed."""
    page = rank.page(name := f"stall{step}.page")
    page.write(page.ALLOWED, 1)
    trigger = rank.trigger(str(STALL), "Stall", page=name)
    kinds = sys.modules[type(trigger).__module__]
    which = kinds.Collectives(operation) if operation else None
    moment = dataclasses.replace(trigger.when, step=step, phase=kinds.Phase.COLLECTIVE, collectives=which)
    return dataclasses.replace(trigger, fault=f"f{step}", when=moment, lease_s=0.3)


def test_a_send_is_stalled_if_it_is_asked_for(rank: Any) -> None:
    """A Moment that names no operation counts collectives only, so that a pipeline has the same Moments as before."""
    triggers = tuple(_trigger(rank, step, which) for step, which in ((1, None), (2, "send"), (3, "recv")))
    ran = _run(rank, triggers=triggers)
    assert [one.of("fault.missed") for one in ran] == [[], []]
    told = [event.data["collective"]["operation"] for event in ran[0].of("fault.applying")]
    assert told == ["all_reduce", "send", "recv"]
