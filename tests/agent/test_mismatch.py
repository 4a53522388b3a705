"""Collectives that a rank leaves out, starts in the wrong order, starts late, or dies in: two real ranks over gloo."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, Callable

import pytest

INJECTORS = Path(__file__).parents[2] / "injectors"
JOB = """
import json, os, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), 2, is_master=not rank)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
weight = torch.nn.Parameter(torch.ones(1))
opt = torch.optim.SGD([weight], lr=0.1)
seen = []
for n in range(6):
    weight.sum().backward()
    a, b = torch.full((4,), 1.0 + rank), torch.full((4,), 10.0 + rank)
    works = [dist.all_reduce(a, async_op=True), dist.all_reduce(b, async_op=True)]
    for work in works: work.wait()
    seen.append((a[0].item(), b[0].item()))
    opt.step()
    with open(os.environ["FOLDER"] + f"/seen{rank}.json", "w") as file: file.write(json.dumps(seen))
time.sleep(0.5)
os._exit(0)
"""
HEALTHY = [3.0, 21.0]


def run(
    rank: Any, injector: str, name: str, nth: int = 1, lease_s: float = 3600.0, **params: Any
) -> tuple[list[int], Any]:
    """Exit codes of both ranks, and what they saw, after the fault in rank 1, step 3, at the nth collective."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    order = rank.order(str(INJECTORS / injector), name)
    kinds = sys.modules[type(order).__module__]
    moment = dataclasses.replace(order.when, pacer=1, step=3, phase=kinds.Phase.COLLECTIVE, nth=nth)
    order = dataclasses.replace(order, when=moment, params=params)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    hooks = ("steps", "collectives", "stamps")
    both = [rank.start(JOB, hooks=hooks, orders=(order,), env={"RANK": str(n), "PORT": port}) for n in (0, 1)]
    done = [rank.wait(one) for one in both]
    files = [rank.folder / f"seen{number}.json" for number in (0, 1)]
    assert done[0].failures == [], done[0].failures
    return [one.code for one in done], [json.loads(file.read_text()) if file.exists() else None for file in files]


def test_one_is_left_out(rank: Any) -> None:
    """The rank that leaves an all-reduce out keeps its own values there, and from then on the two ranks' collectives
    meet the wrong ones, without any error: its next all-reduce is added to the one that the other is at."""
    codes, (peer, own) = run(rank, "collective_drop.py", "Drop")
    assert own[:2] == peer[:2] == [HEALTHY, HEALTHY]
    assert own[2][0] == 2.0  # its own, as it was
    assert peer[2] == [1.0 + 11.0, 10.0 + 2.0]  # the other's first met its second, and so on
    assert codes[0] != 0  # the last one of the other meets nobody


def test_two_are_started_the_wrong_way_round(rank: Any) -> None:
    """What was to be reduced first meets what was to be second, silently; and only in that step."""
    codes, (peer, own) = run(rank, "collective_reorder.py", "Reorder")
    assert codes == [0, 0]
    assert peer[2] == [1.0 + 11.0, 10.0 + 2.0]
    assert own[2] == [10.0 + 2.0, 1.0 + 11.0]
    assert [step for seen in (own, peer) for step in seen[:2] + seen[3:]] == [HEALTHY] * 10
    (effect,) = [event.data for event in rank.read() if event.kind.value == "fault.effect"]
    assert effect["reordered"]


def test_nothing_follows_in_time(rank: Any) -> None:
    """Where the rank starts no other collective before it waits, nothing is out of order, and that is told."""
    codes, seen = run(rank, "collective_reorder.py", "Reorder", nth=2, patience=0.3)
    assert (codes, seen) == ([0, 0], [[HEALTHY] * 6] * 2)
    (effect,) = [event.data for event in rank.read() if event.kind.value == "fault.effect"]
    assert not effect["reordered"]


def test_each_is_late(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """From its moment on, every second collective starts late by the time and at most the jitter, until the lease is
    over; the results are right."""
    codes, seen = run(rank, "collective_delay.py", "Delay", time=0.6, jitter=0.2, every=2, seed=5)
    assert (codes, seen) == ([0, 0], [[HEALTHY] * 6] * 2)
    (own,) = [stamps for stamps in agent_module("stamps").read_folder(rank.folder / "stamps") if stamps[0].rank == 1]
    gaps = [later.start_mono_s - (earlier.returned_mono_s or 0) for earlier, later in pairwise(own)]
    late = {number for number, gap in enumerate(gaps, start=1) if gap >= 0.6}
    assert late >= {5, 7, 9, 11}
    assert len(late) <= 6, f"{late}: a busy machine may add one or two of the other seven"


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("kill", -9),
        pytest.param("abort", -6, marks=pytest.mark.long),
        pytest.param("segfault", -11, marks=pytest.mark.long),
    ],
)
def test_it_dies_inside(rank: Any, agent_module: Callable[[str], Any], how: str, code: int) -> None:
    """The rank dies by that signal when its all-reduce has begun; the other one gets an error."""
    codes, _seen = run(rank, "collective_crash.py", "Crash", by=how)
    assert codes[1] == code
    assert codes[0] not in (0, code)
    (own,) = [stamps for stamps in agent_module("stamps").read_folder(rank.folder / "stamps") if stamps[0].rank == 1]
    assert own[-1].returned_mono_s is not None
    assert len(own) == 5
