"""Measures the agent's cost per step: blocks of steps with the hooks on and off alternate in one process.

Separate runs of the same job differ by a quarter on a shared machine, so on and off are compared side by side. Each
pair of neighbouring blocks gives one ratio of median step times; printed are the median of these ratios and its 95 %
interval (from order statistics, so that a few disturbed blocks change nothing). The job is a small model under DDP
(gloo) with batches of 8 samples of 1 KiB from a DataLoader; a spin makes each step as long as wanted. When off, the
hooks only check a flag, and the hooks of collectives are removed.

All times are processor times of the training thread, unless --wall is given: what other processes do on the same
processors counts only as far as they empty its caches. With two ranks, the time that they wait for each other does not
count either. `--count` counts cycles or instructions instead, which differ less on a busy machine.

`--sets profiler lm-resiliency` measures other tools in the same way: torch's own profiler in its cheapest form, and
lm-resiliency (which must be importable) with its checkpoints in memory. Their start and end are not part of a step.

`--parts` prints where the time goes instead: for each function of the agent the microseconds of a step that it spends
itself. The clock between the functions costs some time too, which is a part of each row.

Usage: python lab/bench/agent_step.py [--ms 1 10 100] [--sets plain samples ...] [--ranks 1 2] [--pairs 60]
[--seconds 40] [--wall] [--count cycles] [--parts]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any

from counters import KINDS, Counter
from intervals import median_interval
from parts import Parts

HARNESS = Path(__file__).resolve().parents[2] / "harness"
PLAIN = ("steps", "loss", "lr")
SETS = {
    "plain": PLAIN, "samples": (*PLAIN, "samples"), "parameters": (*PLAIN, "state"),
    "collectives": (*PLAIN, "collectives"), "stamps": (*PLAIN, "collectives", "stamps"),
}  # fmt: skip


def arm(folder: Path, hooks: tuple[str, ...], rank: int = 0, parts: Parts | None = None) -> Any:
    """Starts the agent in this process, before torch is imported, and returns it."""
    package = sys.modules["_torchaos"] = ModuleType("_torchaos")
    package.__path__ = [str(HARNESS)]
    if parts is not None:
        parts.cover("_torchaos", HARNESS)
    wire = importlib.import_module("_torchaos.protocol.wire")
    agents = importlib.import_module("_torchaos.agent.agent")
    plans = importlib.import_module("_torchaos.protocol.agent_plan")
    os.environ[wire.ENV_PLAN] = str(folder / "plan.json")  # the stamps are written beside the plan
    who = importlib.import_module("_torchaos.agent.startup").Identity(rank, 0, 1, 0, os.getpid())
    events = wire.EventFile(folder / f"rank{rank}.jsonl", f"rank{rank}", rank, 0)
    agent = agents.Agent(plans.AgentPlan("bench", str(folder), hooks), who, events)
    agent.live.discard("collectives")  # `measure` installs and removes them
    importlib.import_module("_torchaos.agent.hooks").install(agent)
    return agent


class Training:
    """The job: a small model under DDP. `clock` tells the times that are compared."""

    def __init__(self, folder: Path, clock: Callable[[], float], rank: int = 0, ranks: int = 1) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        self.model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Linear(64, 1))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        self._clock = clock

    def steps(self, length_s: float) -> Iterator[float]:
        """Trains without end. Yields the time at the end of each step."""
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        data = TensorDataset(torch.randn(512, 256), torch.randn(512))
        batches = (batch for loader in repeat(DataLoader(data, batch_size=8)) for batch in loader)
        # The job's own time is measured once, and the spin adds the rest. The spin is the same with and without hooks,
        # so the cost of the hooks comes on top.
        spin = 0.0
        own: list[float] = []
        for number, (x, y) in enumerate(iter(batches)):
            begun = time.thread_time()
            loss = (self.model(x).squeeze() - y).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self._scheduler.step()
            self.optimizer.zero_grad()
            end = time.thread_time() + spin
            while time.thread_time() < end:
                pass
            if number < 100:
                own.append(time.thread_time() - begun)
                spin = max(0.0, length_s - statistics.median(own)) if number == 99 else 0.0
            yield self._clock()


class OurAgent:
    """The hooks of the agent, switched on and off."""

    def __init__(self, folder: Path, hooks: tuple[str, ...], rank: int, parts: Parts | None) -> None:
        self._agent = arm(folder, hooks, rank, parts)
        self._agent.on = False
        self._watches_collectives, self._collectives = "collectives" in hooks, None

    def begin(self, training: Training) -> None:
        self._agent.on = True
        if self._watches_collectives:
            hooks = importlib.import_module("_torchaos.agent.collectives.collective_hooks")
            self._collectives = hooks.CollectiveHook(self._agent)
            self._collectives.install()

    def end(self) -> None:
        if self._collectives is not None:
            self._collectives.remove()
        self._agent.on = False

    def check(self) -> None:
        assert not self._agent.broken, f"hooks failed: {self._agent.broken}"
        assert not self._agent.unseen, f"hooks never fired: {self._agent.unseen}"


class Profiler:
    """torch's profiler in its cheapest form: operations of the CPU, without shapes and stacks."""

    def begin(self, training: Training) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.start()

    def end(self) -> None:
        self._profile.stop()

    def check(self) -> None:
        assert len(self._profile.events() or ()), "the profiler saw nothing"


class LmResiliency:
    """lm-resiliency with nothing but its checkpoints in memory, each tenth step."""

    def begin(self, training: Training) -> None:
        import torch.distributed as dist
        from lm_resiliency import enable_resiliency

        world = dist.group.WORLD  # without groups, it would make one of NCCL
        self._handle = enable_resiliency(
            training.model, training.optimizer, interval=10, enable_detection=False, group=world, nccl_group=world
        )

    def end(self) -> None:
        self._handle.close()

    def check(self) -> None:
        assert self._handle.step_count, "lm-resiliency saw no step"


OTHERS = {"profiler": Profiler, "lm-resiliency": LmResiliency}


class Job:
    """The training job of one rank in this process, with a tool that can be switched on and off."""

    def __init__(self, folder: Path, given: argparse.Namespace, parts: Parts | None = None) -> None:
        name, rank = given.sets[0], given.rank
        self._tool = OTHERS[name]() if name in OTHERS else OurAgent(folder, SETS[name], rank, parts)
        clock = Counter(given.count).read if given.count else time.perf_counter if given.wall else time.thread_time
        self._training = Training(folder, clock, rank, given.ranks[0])
        self._steps = self._training.steps(given.ms[0] / 1000)
        for _ in range(150):
            next(self._steps)

    def run(self, count: int, on: bool) -> float:
        """The median of `count` steps, in seconds or counts."""
        if on:
            self._tool.begin(self._training)
        before = next(self._steps)
        times = []
        for _ in range(count):
            now = next(self._steps)
            times.append(now - before)
            before = now
        if on:
            self._tool.end()
        return statistics.median(times)

    def check(self) -> None:
        self._tool.check()


def measure(given: argparse.Namespace, folder: Path) -> str:
    """A row of the table: ratio on/off, the ends of its 95 % interval, and the difference in microseconds per step."""
    job = Job(folder, given)
    block = max(5, int(given.seconds / given.pairs / 2 / (given.ms[0] / 1000)))
    ratios, differences = [], []
    for pair in range(given.pairs):
        first = bool(pair % 2)  # on and off go first in turn, so that a drift cancels out
        found = {first: job.run(block, first)}
        found[not first] = job.run(block, not first)
        ratios.append(found[True] / found[False])
        differences.append((found[True] - found[False]) * (1e-3 if given.count else 1e6))
    job.check()
    ratio, low, high = median_interval(ratios)
    extra, least, most = median_interval(differences)
    unit = f"thousand {given.count}" if given.count else "us"
    return f"{ratio:8.4f}  [{low:.4f}, {high:.4f}]  {extra:+8.1f} {unit}  [{least:+.1f}, {most:+.1f}]"


def split(given: argparse.Namespace, folder: Path) -> str:
    """The functions of the agent with the microseconds of a step that they spend themselves, the longest first."""
    parts = Parts()
    job = Job(folder, given, parts)
    count = max(20, int(given.seconds / (given.ms[0] / 1000)))
    job.run(20, True)
    parts.clear()
    job.run(count, True)
    rows = parts.rows(count + 1)
    lines = [f"{name:45} {calls:5.1f} x {cost:8.1f} us" for name, calls, cost in rows if cost >= 0.05]
    return "\n".join(["", *lines, f"{'all':45} {'':7} {sum(cost for *_, cost in rows):8.1f} us"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ms", type=float, nargs="+", default=[1, 10, 100], help="lengths of a step")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=[*SETS, *OTHERS], help="which hooks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], choices=[1, 2])
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks, 6 at least")
    parser.add_argument("--seconds", type=float, default=40, help="for each row of the table")
    parser.add_argument("--wall", action="store_true", help="measure the time that passes")
    parser.add_argument("--count", choices=list(KINDS), help="count these instead of measuring times")
    parser.add_argument("--parts", action="store_true", help="measure each function of the agent")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # one rank of one row, in a process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        found = (split if given.parts else measure)(given, given.folder)
        if given.rank == 0:
            print(found, flush=True)
        os._exit(0)  # the other rank waits for nobody
    title = f"{'on/off':>8}  {'95 % interval':16}  {'a step':>11}"
    print(f"{'step':>10}  {'hooks':11} {'ranks':>5} {'' if given.parts else title}", flush=True)
    for ranks in given.ranks:
        for hooks in given.sets:
            for ms in given.ms:
                print(f"{ms:7g} ms  {hooks:11} {ranks:5} ", end="", flush=True)
                if in_processes(given, ["--ms", str(ms), "--sets", hooks, "--ranks", str(ranks)], ranks):
                    return 1
    return 0


def in_processes(given: argparse.Namespace, which: list[str], ranks: int) -> int:
    """Runs one row in its own processes, one for each rank. Returns the exit code of the first rank."""
    flags = [f"--{name}" for name in ("wall", "parts") if getattr(given, name)]
    options = [*which, "--pairs", str(given.pairs), "--seconds", str(given.seconds), *flags]
    options += ["--count", given.count] if given.count else []
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "KINETO_LOG_LEVEL": "6"}  # the profiler is silent
        all_ranks = [
            subprocess.Popen([sys.executable, __file__, *options, "--rank", str(rank), "--folder", folder], env=env)
            for rank in range(ranks)
        ]
        code = all_ranks[0].wait()
        for other in all_ranks[1:]:
            other.kill()
            other.wait()
    return code


if __name__ == "__main__":
    sys.exit(main())
