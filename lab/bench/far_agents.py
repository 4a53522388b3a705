"""What many nodes cost the controller of a run on a real Slurm cluster, whose nodes are namespaces of this machine.

    python lab/bench/far_agents.py [NODES ...]

For each number of nodes (default: 4, 16, 64): a run with an agent on each node, all started by one srun, and a freeze
of the last node. The ranks are stand-ins without torch, with four steps a second. Printed: the processor time of
`torchaos run` while all agents are connected, as a share of one core; its resident memory; the round trips to the
agents, which are twice the stated errors of the clocks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from clusters.runs import STEP
from clusters.slurm import SlurmRun, cluster, missing
from dying.families import STAND_IN
from waiting import wait_until

from torchaos.harness.protocol.wire import Kind

STEPS, STEP_S = 160, 0.25
WATCH_S = 15.0  # how long the controller is watched, once all agents are connected
HEAD = "| nodes | all agents up (s) | share of a core (%) | memory (MiB) | round trip: median, largest (ms) | verdict |"


def main(counts: Sequence[int]) -> int:
    if lacks := missing():
        print(lacks)
        return 3
    print(f"{HEAD}\n|---|---|---|---|---|---|")
    for count in counts:
        print(measured(count), flush=True)
    return 0


def measured(count: int) -> str:
    with cluster(count) as slurm:
        fault = {"inject": "node.freeze", "target": {"node": count - 1}, "when": STEP, "for": "1s"}
        train = f"{STAND_IN}/train.py {STEPS} --step-s {STEP_S} --save {{run}}/checkpoints"
        job = {
            "nodes": count, "world_size": count, "timeout": "5m",
            "command": f"{{python}} {STAND_IN}/torchrun --nproc-per-node 1 {train}",
        }  # fmt: skip
        begun = time.monotonic()
        run = SlurmRun(slurm, f"size-{count}", fault, steps=STEPS, job=job)
        process = wait_until(lambda: controller(run.name))
        wait_until(lambda: len({event.data["node"] for event in run.events(Kind.CLOCK)}) == count, timeout_s=200.0)
        up_s = time.monotonic() - begun
        before, from_s = cpu_s(process), time.monotonic()
        time.sleep(WATCH_S)
        share, memory = (cpu_s(process) - before) / (time.monotonic() - from_s), process.memory_info().rss
        run.end()
        verdict = run.result.verdict.value
        trips = [2e3 * event.data["error_s"] for event in run.events(Kind.CLOCK)]
    return (
        f"| {count} | {up_s:.1f} | {100 * share:.1f} | {memory / 2**20:.0f} | {median(trips):.2f}, {max(trips):.2f} "
        f"| {verdict} |"
    )


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def controller(name: str) -> psutil.Process | None:
    """The process of `torchaos run` for this scenario."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "run" in words and any("torchaos" in word for word in words[:2]) and any(f"{name}.yaml" in w for w in words):
            return process
    return None


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]] or [4, 16, 64]))
