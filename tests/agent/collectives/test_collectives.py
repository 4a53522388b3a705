"""Collectives in a real rank: they are seen however they are called, distinguished, stamped, and stalled for the wanted
time only."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pytest
from waiting import wait_until

HEAD = """
import os, sys, time, torch, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
def step(*before):
    opt.zero_grad(); model(torch.ones(2, 4)).sum().backward()
    for one in before: one()
    opt.step()
"""
ALL = """
x, eight = torch.ones(4), torch.zeros(4, dtype=torch.float64)
dist.all_reduce(x); dist.all_gather([torch.zeros(4)], x); dist.all_gather_into_tensor(torch.zeros(4), x)
dist.reduce_scatter_tensor(torch.zeros(4), x); dist.broadcast(eight, 0); dist.barrier()
dist.all_to_all_single(torch.zeros(4), x)
dist.reduce(x, 0); dist.gather(x, [torch.zeros(4)]); dist.scatter(torch.zeros(4), [x])
"""
STALL = Path(__file__).parents[3] / "injectors" / "waiting.py"


def stamps_of(rank: Any, agent_module: Callable[[str], Any]) -> list[Any]:
    (found,) = agent_module("protocol.collective_stamps").read_folder(rank.folder / "stamps")
    return list(found)


@pytest.mark.slow
def test_every_operation_is_stamped(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """Each collective leaves one stamp with its operation, group, size and times, in the order of the calls."""
    ran = rank.run(HEAD + ALL + "step(); os._exit(0)", hooks=("steps", "collectives", "stamps"), cold=True)
    assert (ran.code, ran.failures) == (0, []), ran.output
    found = stamps_of(rank, agent_module)
    names = [
        "all_reduce", "all_gather", "all_gather", "reduce_scatter", "broadcast", "barrier", "all_to_all", "reduce",
        "gather", "scatter",
    ]  # fmt: skip
    assert [stamp.op for stamp in found] == names
    assert [stamp.bytes for stamp in found] == [16, 16, 16, 16, 32, 0, 16, 16, 16, 16]
    assert [stamp.seq for stamp in found] == list(range(1, len(names) + 1))
    assert {(stamp.group, stamp.ranks, stamp.rank, stamp.step) for stamp in found} == {("0", (0,), 0, 0)}
    assert all(stamp.start_mono_s <= (stamp.returned_mono_s or 0) for stamp in found)


TWO = """
import os, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), 2, is_master=not rank)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
dist.all_reduce(torch.ones(1))
if rank == 0:
    dist.all_reduce(torch.ones(1))
time.sleep(600)
"""


def test_what_never_ends_stays_open(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """The stamp of a collective that waits for somebody who never comes has returned and is open, also once its rank is
    dead; and those before it have ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    hooks = ("steps", "collectives", "stamps")
    ranks = [rank.start(TWO, hooks=hooks, env={"RANK": str(number), "PORT": port}) for number in (0, 1)]
    read = agent_module("protocol.collective_stamps").read_folder

    def is_so() -> bool:
        found = sorted([stamp.open for stamp in stamps] for stamps in read(rank.folder / "stamps"))
        return found == [[False], [False, True]]

    try:
        wait_until(is_so)
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
    last = next(stamps for stamps in read(rank.folder / "stamps") if len(stamps) == 2)[-1]
    assert (last.open, last.rank, last.ranks, last.returned_mono_s is not None) == (True, 0, (0, 1), True)


BLOCKING = """
import os, sys, threading, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), 2, is_master=not rank)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
(collectives,) = (module for name, module in sys.modules.items() if name.endswith("agent.collectives.collective_hooks"))
original = collectives.calls(torch.ops.c10d.monitored_barrier_.default)
excluded, inside = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU), threading.Event()
def kernel(*args):
    inside.set()
    with torch._C._ExcludeDispatchKeyGuard(excluded):
        return original(*args)
library = torch.library.Library("c10d", "IMPL")
library.impl("monitored_barrier_", kernel, "AutogradCPU")
def other():
    inside.wait()
    for number in range(100):
        time.sleep(0.001)
    store.set("another thread runs", "")
if rank == 0:
    threading.Thread(target=other).start()
else:
    store.wait(["another thread runs"])
dist.monitored_barrier()
dist.barrier()
os._exit(0)
"""


def test_other_threads_run_during_a_collective(rank: Any) -> None:
    """While the original blocks, another thread of the rank runs, so the GIL is free. Rank 1 joins only then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    hooks = ("steps", "collectives")
    ranks = [rank.start(BLOCKING, hooks=hooks, env={"RANK": str(number), "PORT": port}) for number in (0, 1)]
    outputs = [one.communicate()[0] for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], outputs


AT_EXIT = """
import os, sys, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), 2, is_master=not rank)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
(stamping,) = (module for name, module in sys.modules.items() if name.endswith("agent.collectives.collective_hooks"))
stamping._PERIOD_S = 3600.0
if rank == 1:
    store.wait(["rank 0 waits"])
work = dist.all_reduce(torch.ones(1), async_op=True)
store.set(f"rank {rank} waits", "")
work.wait()
store.wait(["rank 1 waits"])
"""


def test_what_ends_at_the_very_end_is_closed(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """A collective that ends just before its rank leaves is no open stamp, although the thread had no time to look."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    hooks = ("steps", "collectives", "stamps")
    ranks = [rank.start(AT_EXIT, hooks=hooks, env={"RANK": str(number), "PORT": port}) for number in (0, 1)]
    outputs = [one.communicate()[0] for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], outputs
    found = agent_module("protocol.collective_stamps").read_folder(rank.folder / "stamps")
    assert [[stamp.open for stamp in stamps] for stamps in found] == [[False], [False]]


class Work:
    """A collective in progress. `looks`: how often somebody asked whether it has ended."""

    done, looks = False, 0

    def is_completed(self) -> bool:
        self.looks += 1
        return self.done


def test_the_thread_sleeps_while_nothing_is_open(
    agent_module: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a collective is in progress the thread looks at it again and again. When none is, it waits without a time
    limit; the next collective wakes it, and so does the end of the process."""
    stamping = agent_module("agent.collectives.collective_hooks")
    monkeypatch.setenv(agent_module("protocol.wire").ENV_PLAN, str(tmp_path / "plan.json"))
    monkeypatch.setattr(stamping, "_PERIOD_S", 0.001)
    who = SimpleNamespace(rank=0, attempt=0, pid=os.getpid())
    own = stamping.StampWriter(SimpleNamespace(who=who, on=True, careful=lambda hook: lambda function: function))
    waits: list[tuple[Any, ...]] = []
    real = own._opened.wait

    def wait(*limit: Any) -> Any:
        waits.append(limit)
        return real(*limit)

    monkeypatch.setattr(own._opened, "wait", wait)
    for number in (1, 2):
        work = Work()
        own._follow(own.stamps.begin("all_reduce", own.stamps.group("0", [0]), 8, 0), work)
        wait_until(partial(getattr, work, "looks"), lambda looks: looks > 3)
        assert len(waits) < number
        work.done = True
        wait_until(lambda: waits[number - 1 :])  # noqa: B023 (called at once)
        assert waits == [()] * number
        (path,) = (tmp_path / "stamps").iterdir()
        assert [stamp.open for stamp in agent_module("protocol.collective_stamps").read_stamps(path)] == [
            False
        ] * number
    own.stop()
    assert not own._thread.is_alive()


FUNCTIONAL = (
    HEAD
    + """
import torch.distributed._functional_collectives as functional
world = dist.group.WORLD
def f(x):
    return functional.all_reduce(model(x), "sum", world) * 2
x = torch.ones(2, 4)
f(x).sum().item()
functional.all_gather_tensor(x, 0, world).sum().item()
functional.reduce_scatter_tensor(x, "sum", 0, world).sum().item()
print("eager", flush=True)
compiled = torch.compile(f, backend="aot_eager")
for _ in range(2):
    total = compiled(x).sum()
    total.item()
    if total.requires_grad: total.backward()  # not in old versions of torch
print("differentiable", total.requires_grad, flush=True)
with torch.no_grad(): compiled(x).sum().item()
os._exit(0)
"""
)


@pytest.mark.slow
def test_functional_collectives_are_seen(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """Functional collectives leave one stamp each, closed by the wait for them, eager and compiled; tracing, none."""
    ran = rank.run(FUNCTIONAL, hooks=("steps", "collectives", "stamps"))
    assert (ran.code, ran.failures) == (0, []), ran.output
    found = stamps_of(rank, agent_module)
    assert [stamp.op for stamp in found[:3]] == ["all_reduce", "all_gather", "reduce_scatter"]
    # Two compiled steps, each forward and (of an all_reduce) backward, and one without gradients.
    assert [stamp.op for stamp in found[3:]] == ["all_reduce"] * (5 if "differentiable True" in ran.output else 3)
    assert all(stamp.group == "0" and not stamp.open for stamp in found)


def stall(rank: Any, step: int = 2, lease_s: float = 3600.0, nth: int = 1, **which: Any) -> Any:
    """A trigger for a stall in that step, and its page, armed."""
    name = f"stall{step}.page"
    page = rank.page(name)
    page.write(page.ALLOWED, 1)
    trigger = rank.trigger(str(STALL), "Stall", page=name)
    kinds = sys.modules[type(trigger).__module__]
    moment = dataclasses.replace(
        trigger.when, step=step, nth=nth, phase=kinds.Phase.COLLECTIVE,
        collectives=kinds.Collectives(**which) if which else None,
    )  # fmt: skip
    return page, dataclasses.replace(trigger, fault=f"f{step}", when=moment, lease_s=lease_s)


STEPS = f"""{HEAD}
def many():
    dist.all_reduce(torch.ones(4)); dist.broadcast(torch.ones(64), 0); dist.all_reduce(torch.ones(64)); dist.barrier()
for n in range(10): step(many)
os._exit(0)
"""
# What tells a collective of a step from the others, and its place among the four.
WHICH: list[tuple[dict[str, Any], int]] = [
    ({}, 0), ({"nth": 3}, 2), ({"operation": "all_reduce", "nth": 2}, 2), ({"operation": "barrier"}, 3),
    ({"min_bytes": 100}, 1), ({"operation": "all_reduce", "min_bytes": 100}, 2), ({"max_bytes": 0}, 3),
    ({"group": "default_pg", "nth": 4}, 3),
]  # fmt: skip


def test_the_one_collective_is_stalled(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """A stall lies before the very collective that operation, number, size and group tell from the others: in each step
    another one, for 0.3 s, and before no other."""
    triggers = tuple(stall(rank, step, 0.3, **which)[1] for step, (which, _place) in enumerate(WHICH, start=2))
    ran = rank.run(STEPS, hooks=("steps", "collectives", "stamps"), triggers=triggers)
    assert (ran.code, ran.failures, ran.of("fault.missed")) == (0, [], []), ran.output
    found = stamps_of(rank, agent_module)
    waited = [later.start_mono_s - earlier.start_mono_s for earlier, later in pairwise(found)]
    late = [number for number, seconds in enumerate(waited, start=1) if seconds >= 0.3]
    assert late == [4 * step + place for step, (_which, place) in enumerate(WHICH, start=1)]
    told = [event.data["collective"]["operation"] for event in ran.of("fault.applying")]
    assert told == [found[number].op for number in late]


def test_a_stall_is_taken_back_at_any_moment(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """A rank that is stalled without an end goes on as soon as its page says so, and does all that was left to do."""
    page, trigger = stall(rank, operation="broadcast")
    process = rank.start(STEPS, hooks=("steps", "collectives", "stamps"), triggers=(trigger,))
    wait_until(lambda: page.read(page.FIRED))
    taken_back = time.monotonic()
    page.write(page.GO, 2**62)  # what taking it back does
    ran = rank.wait(process)
    found = stamps_of(rank, agent_module)
    assert (ran.code, len(found)) == (0, 40), ran.output
    assert found[4].start_mono_s < taken_back
    assert found[5].start_mono_s >= taken_back


def test_a_group_that_does_not_exist_is_missed(rank: Any) -> None:
    """A trigger for a process group that has no collective in its step says how often one came."""
    _page, trigger = stall(rank, lease_s=0.3, group="nobody")
    ran = rank.run(STEPS, hooks=("steps", "collectives"), triggers=(trigger,))
    (missed,) = ran.of("fault.missed")
    assert "by a collective of that kind 0 times" in missed.data["reason"]


def test_stamps_go_round(agent_module: Callable[[str], Any], tmp_path: Path) -> None:
    """The ring holds the last collectives; an end that comes for one which is no longer in it changes nothing."""
    stamps = agent_module("protocol.collective_stamps")
    writer = stamps.Stamps(tmp_path / "a.stamps", 3, 1, 77)
    first = writer.begin("all_reduce", writer.group("tp", [0, 1, 2, 3, 6]), 8, 0)
    others = [writer.begin("barrier", writer.group("dp", [1, 3]), 0, n) for n in range(stamps.SLOTS)]
    writer.ended(first)
    writer.ended(others[-1])
    found = stamps.read_stamps(tmp_path / "a.stamps")
    assert [stamp.number for stamp in found] == others
    assert [stamp.open for stamp in found] == [True] * (stamps.SLOTS - 1) + [False]
    assert (found[0].group, found[0].ranks, found[0].seq, found[0].rank, found[0].attempt) == ("dp", (1, 3), 1, 3, 1)


def test_groups_beyond_the_table_share_its_last_place(agent_module: Callable[[str], Any], tmp_path: Path) -> None:
    """More groups than the table holds, names and lists of ranks too long for it: nothing breaks, ranks are unknown."""
    stamps = agent_module("protocol.collective_stamps")
    writer = stamps.Stamps(tmp_path / "a.stamps", 0, 0, 7)
    codes = [writer.group(f"{n}-" + "x" * 200, range(0, 2000, 2)) for n in range(stamps.GROUPS + 5)]
    writer.begin("gather", codes[-1], 1, 0)
    (found,) = stamps.read_stamps(tmp_path / "a.stamps")
    assert (max(codes), found.ranks) == (stamps.GROUPS - 1, None)


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(15000)])
def test_what_is_no_file_of_stamps_is_refused(
    agent_module: Callable[[str], Any], tmp_path: Path, content: bytes
) -> None:
    """A file that is none of ours, or is not finished, is an error to one who names it and is left out of a folder."""
    stamps = agent_module("protocol.collective_stamps")
    path = tmp_path / "a.stamps"
    path.write_bytes(content.ljust(stamps.SIZE, b"\0") if len(content) > 1000 else content)
    with pytest.raises(ValueError, match="stamps"):
        stamps.read_stamps(path)
    assert stamps.read_folder(tmp_path) == []
