"""Measures the agent's cost per step: blocks of steps with the hooks on and off alternate in one process.

Separate runs of the same job differ by a quarter on a shared machine, so on and off are compared side by side. Each
pair of neighbouring blocks gives one ratio of median step times; the mean of the logarithms of these ratios has a 95 %
interval (Student's t). The job is a small model under DDP (gloo, one process) with batches of 8 samples of 1 KiB from a
DataLoader; a spin makes each step as long as wanted. When off, the hooks only check a flag, and the hooks of
collectives are removed.

Usage: python ci/bench/agent_step.py [--ms 1 10 100] [--pairs 20] [--seconds 40]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "harness" / "agent"
PLAIN = ("steps", "loss", "samples", "lr", "checkpoints")
# Student's t, 97.5 %, by degrees of freedom (NIST/SEMATECH e-Handbook, table 1.3.6.7.2); beyond 30 it is nearly normal.
T = {4: 2.776, 9: 2.262, 14: 2.145, 19: 2.093, 24: 2.064, 29: 2.045}


def arm(folder: Path, hooks: tuple[str, ...]) -> Any:
    """Start the agent in this process, before torch is imported, and return it."""
    spec = importlib.util.spec_from_file_location(
        "_torchaos_agent", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["_torchaos_agent"] = package
    spec.loader.exec_module(package)
    wire = importlib.import_module("_torchaos_agent.wire")
    agents = importlib.import_module("_torchaos_agent.agent")
    plans = importlib.import_module("_torchaos_agent.plan")
    os.environ[wire.ENV_PLAN] = str(folder / "plan.json")  # the stamps are written beside it
    who = importlib.import_module("_torchaos_agent.arming").Identity(0, 0, 1, 0, os.getpid())
    events = wire.EventFile(folder / "rank0.jsonl", "rank0", 0, 0)
    agent = agents.Agent(plans.AgentPlan("bench", str(folder), hooks), who, events)
    agent.live.discard("collectives")  # they are installed and removed, see `measure`
    importlib.import_module("_torchaos_agent.hooks").install(agent)
    return agent


def steps(folder: Path, length_s: float) -> Iterator[float]:
    """Trains without end; yields the time at the end of each step (time.perf_counter, seconds)."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    data = TensorDataset(torch.randn(512, 256), torch.randn(512))
    batches = (batch for loader in repeat(DataLoader(data, batch_size=8)) for batch in loader)
    # The job's own time is measured once, and the spin adds the rest. The spin is the same with and without hooks, so
    # the cost of the hooks comes on top.
    spin = 0.0
    own: list[float] = []
    for number, (x, y) in enumerate(iter(batches)):
        begun = time.perf_counter()
        loss = (model(x).squeeze() - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        end = time.perf_counter() + spin
        while time.perf_counter() < end:
            pass
        if number < 100:
            own.append(time.perf_counter() - begun)
            spin = max(0.0, length_s - statistics.median(own)) if number == 99 else 0.0
        yield time.perf_counter()


def measure(ms: float, hooks: tuple[str, ...], pairs: int, seconds: float) -> tuple[float, float, float, float]:
    """The ratio on/off, the ends of its 95 % interval, and the difference in microseconds per step."""
    with tempfile.TemporaryDirectory() as name:
        agent = arm(Path(name), hooks)
        clock = steps(Path(name), ms / 1000)
        agent.on = False
        for _ in range(150):
            next(clock)
        collectives = None
        if "collectives" in hooks:
            collectives = importlib.import_module("_torchaos_agent.collectives").CollectiveHook(agent)
        block = max(5, int(seconds / pairs / 2 / (ms / 1000)))

        def run(on: bool) -> float:
            agent.on = on
            if on and collectives is not None:
                collectives.install()
            before = next(clock)
            times = []
            for _ in range(block):
                now = next(clock)
                times.append(now - before)
                before = now
            if on and collectives is not None:
                collectives.remove()
            return statistics.median(times)

        ratios, differences = [], []
        for pair in range(pairs):
            first = bool(pair % 2)  # on and off go first in turn, so that a drift cancels out
            found = {first: run(first)}
            found[not first] = run(not first)
            ratios.append(math.log(found[True] / found[False]))
            differences.append((found[True] - found[False]) * 1e6)
        assert not agent.broken, f"hooks failed: {agent.broken}"
        assert agent.unseen <= {"checkpoints"}, f"hooks never fired: {agent.unseen}"
    mean = statistics.fmean(ratios)
    half = T.get(pairs - 1, 2.0) * statistics.stdev(ratios) / math.sqrt(pairs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half), statistics.median(differences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ms", type=float, nargs="+", default=[1, 10, 100], help="lengths of a step")
    parser.add_argument("--pairs", type=int, default=20, choices=[5, 10, 15, 20, 25, 30], help="pairs of blocks")
    parser.add_argument("--seconds", type=float, default=40, help="for each row of the table")
    parser.add_argument(
        "--one", choices=["plain", "collectives", "stamps"], help=argparse.SUPPRESS
    )  # one row, in a process of its own
    given = parser.parse_args()
    if given.one:
        more = {"plain": (), "collectives": ("collectives",), "stamps": ("collectives", "stamps")}
        hooks = (*PLAIN, *more[given.one])
        ratio, low, high, extra = measure(given.ms[0], hooks, given.pairs, given.seconds)
        print(f"{given.ms[0]:7g} ms  {given.one:12} {ratio:8.4f}  [{low:.4f}, {high:.4f}]  {extra:+9.1f} us")
        return 0
    print(f"{'step':>10}  {'hooks':12} {'on/off':>8}  {'95 % interval':16}  {'a step':>12}", flush=True)
    for one in ("plain", "collectives", "stamps"):
        for ms in given.ms:
            options = ["--one", one, "--ms", str(ms), "--pairs", str(given.pairs), "--seconds", str(given.seconds)]
            subprocess.run([sys.executable, __file__, *options], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
