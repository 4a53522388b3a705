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

INJECTORS = Path(__file__).parents[3] / "injectors"
JOB = """
import json, os, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), 2, is_master=not rank)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
weight = torch.nn.Parameter(torch.ones(1))
opt = torch.optim.SGD([weight], lr=0.1)
seen = []
for n in range(9):
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


def run(rank: Any, *triggers: Any, job: str = JOB) -> tuple[list[int], Any]:
    """Exit codes of both ranks, and what they saw."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    hooks = ("steps", "collectives", "stamps")
    both = [rank.start(job, hooks=hooks, triggers=triggers, env={"RANK": str(n), "PORT": port}) for n in (0, 1)]
    done = [rank.wait(one) for one in both]
    files = [rank.folder / f"seen{number}.json" for number in (0, 1)]
    assert done[0].failures == [], done[0].failures
    return [one.code for one in done], [json.loads(file.read_text()) if file.exists() else None for file in files]


def trigger(rank: Any, injector: str, name: str, step: int = 3, nth: int = 1, **params: Any) -> Any:
    """A fault in rank 1, at the nth collective of the step."""
    page = rank.page(f"{name}{step}.page")
    page.write(page.ALLOWED, 1)
    made = rank.trigger(str(INJECTORS / injector), name, page=f"{name}{step}.page")
    kinds = sys.modules[type(made).__module__]
    moment = dataclasses.replace(made.when, pacer=1, step=step, phase=kinds.Phase.COLLECTIVE, nth=nth)
    return dataclasses.replace(made, fault=f"{name}{step}", when=moment, params=params)


@pytest.fixture(scope="module")
def silent(rank_in: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[int], Any]:
    """One job with the faults that leave its ranks in step: what it left, the exit codes, and what the ranks saw."""
    rank = rank_in(tmp_path_factory.mktemp("silent"))
    return rank, *run(
        rank,
        trigger(rank, "collective_order.py", "Reorder"),
        trigger(rank, "collective_order.py", "Reorder", step=4, nth=2, patience=0.3),
        trigger(rank, "collective_delay.py", "Delay", step=5, time=0.6, jitter=0.2, every=2, seed=5),
    )


def effects(rank: Any, fault: str) -> list[bool]:
    events = [event.data for event in rank.read() if event.kind.value == "fault.effect"]
    return [event["reordered"] for event in events if event["fault"] == fault]


def test_one_is_left_out(rank: Any) -> None:
    """The rank that leaves an all-reduce out keeps its own values there, and from then on the two ranks' collectives
    meet the wrong ones, without any error: its next all-reduce is added to the one that the other is at."""
    codes, (peer, own) = run(rank, trigger(rank, "collective_order.py", "Drop"))
    assert own[:2] == peer[:2] == [HEALTHY, HEALTHY]
    assert own[2][0] == 2.0  # its own, as it was
    assert peer[2] == [1.0 + 11.0, 10.0 + 2.0]  # the other's first met its second, and so on
    assert codes[0] != 0  # the last one of the other meets nobody


def test_two_are_started_the_wrong_way_round(silent: Any) -> None:
    """What was to be reduced first meets what was to be second, silently; and only in that step."""
    rank, codes, (peer, own) = silent
    assert codes == [0, 0]
    assert peer[2] == [1.0 + 11.0, 10.0 + 2.0]
    assert own[2] == [10.0 + 2.0, 1.0 + 11.0]
    assert [step for seen in (own, peer) for step in seen[:2] + seen[3:]] == [HEALTHY] * 16
    assert effects(rank, "Reorder3") == [True]


def test_a_rank_that_dies_of_the_wrong_order(rank: Any) -> None:
    """Two collectives of other sizes that change places end the rank at once: that the order was wrong is reported
    before."""
    job = JOB.replace("torch.full((4,), 10.0", "torch.full((400_000,), 10.0")
    codes, _seen = run(rank, trigger(rank, "collective_order.py", "Reorder"), job=job)
    assert codes != [0, 0]
    assert effects(rank, "Reorder3") == [True]


def test_nothing_follows_in_time(silent: Any) -> None:
    """Where the rank starts no other collective before it waits, nothing is out of order, and that is told."""
    rank, _codes, (peer, own) = silent
    assert peer[3] == own[3] == HEALTHY
    assert effects(rank, "Reorder4") == [False]


def test_each_is_late(silent: Any, agent_module: Callable[[str], Any]) -> None:
    """From its moment on, every second collective starts late by the time and at most the jitter; the results are
    right."""
    rank, _codes, (peer, own) = silent
    assert peer[4:] == own[4:] == [HEALTHY] * 5
    (stamps,) = [
        stamps
        for stamps in agent_module("protocol.collective_stamps").read_folder(rank.folder / "stamps")
        if stamps[0].rank == 1
    ]
    gaps = [later.start_mono_s - (earlier.returned_mono_s or 0) for earlier, later in pairwise(stamps)]
    late = {number for number, gap in enumerate(gaps, start=1) if number > 8 and gap >= 0.6}
    assert late >= {9, 11, 13, 15, 17}
    assert len(late) <= 6, f"{late}: only a busy machine adds one"


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
    codes, _seen = run(rank, trigger(rank, "collective_crash.py", "Crash", by=how))
    assert codes[1] == code
    assert codes[0] not in (0, code)
    (own,) = [
        stamps
        for stamps in agent_module("protocol.collective_stamps").read_folder(rank.folder / "stamps")
        if stamps[0].rank == 1
    ]
    assert own[-1].returned_mono_s is not None
    assert len(own) == 5
