"""Measures a run's own time: what `torchaos run` adds to a job. Aims: 0.4 s before the job's command starts, 0.3 s
after its end, and 2 % of a core in between.

The same command is run plain (torchrun) and under `torchaos run` (no faults, no twin, the assertions of the main job),
in turn. Each pair of neighbours gives one difference of wall-clock times; printed are the median and the mean of the
differences, with its 95 % interval (Student's t). The stages of the same runs show where the time goes: before the job
(start-up, planning, the reaper), during it (its own time, and its slowdown because it is watched), and after it
(collecting, healing, reading the checkpoints, judging, and the exit of the command). The processor time is that of
torchaos and its reaper without the job, from /proc/PID/stat, which counts hundredths of a second; on a busy machine it
says more than the times do.

Usage: python lab/bench/own_time.py [--pairs 6] [--steps 60]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
POLL_S = 0.02
PARTS = ("before", "after", "inventory")
ASSERTIONS = ["checkpoint_integrity", "loss_continuity", "sample_accounting", "completed"]


@dataclass(frozen=True)
class Watched:
    """One run under torchaos, in seconds."""

    whole: float
    before: float  # until the job was started
    job: float
    after: float
    inventory: float  # the part of `after` that reads the checkpoints
    processor: tuple[float, float, float]  # processor time before the job, while it ran, and after it


class Processor(threading.Thread):
    """Samples the processor time of a process and of the reaper below it."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._over = pid, threading.Event()
        self._by_pid: dict[int, float] = {}
        self.samples: list[tuple[float, float]] = []  # (CLOCK_MONOTONIC, processor seconds in total)

    def run(self) -> None:
        while not self._over.wait(POLL_S):
            for pid in (self._pid, *self._reapers()):
                self._by_pid[pid] = _used(pid) or self._by_pid.get(pid, 0.0)
            self.samples.append((time.monotonic(), sum(self._by_pid.values())))

    def end(self) -> None:
        self._over.set()
        self.join()

    def around(self, start_s: float, end_s: float) -> tuple[float, float, float]:
        """Processor seconds before, between and after two times."""
        first, second, last = (
            max((used for at, used in self.samples if at <= until), default=0.0) for until in (start_s, end_s, math.inf)
        )
        return first, second - first, last - second

    def _reapers(self) -> list[int]:
        try:
            tasks = Path(f"/proc/{self._pid}/task").glob("*/children")
            children = [int(pid) for task in tasks for pid in task.read_text().split()]
            return [pid for pid in children if b".reaper\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        except OSError:
            return []


def _used(pid: int) -> float | None:
    """User and system time of a process in seconds, with all its threads, without its children (proc(5), fields 14 and
    15)."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(found[11]) + int(found[12])) * TICK_S


def command_of(steps: int, jobs: str, checkpoints: str) -> str:
    return f"torchrun --nproc-per-node 2 {jobs}/gpt_ddp.py --steps {steps} --checkpoint-dir {checkpoints}"


def bare(steps: int, folder: Path) -> float:
    command = command_of(steps, str(files("torchaos.scenarios") / "jobs"), str(folder / "checkpoints"))
    begun = time.monotonic()
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    took = time.monotonic() - begun
    assert "done:" in done.stdout, done.stdout + done.stderr
    return took


def watched(steps: int, folder: Path) -> Watched:
    file, out = folder / "cost.yaml", folder / "out"
    command = command_of(steps, "{jobs}", "{run}/checkpoints")
    job = {"command": command, "checkpoints": {"path": "{run}/checkpoints"}, "timeout": "10m"}
    scenario = {"scenario": "cost", "job": job, "assert": ASSERTIONS, "twin": "none"}
    file.write_text(json.dumps(scenario))  # JSON is YAML
    begun = time.monotonic()
    command_line = [sys.executable, "-m", "torchaos.harness", "run", str(file), "--out", str(out)]
    process = subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    processor = Processor(process.pid)
    processor.start()
    output, _ = process.communicate()
    end = time.monotonic()
    processor.end()
    if not list(out.glob("*/result.json")):
        sys.exit(f"the run came to no result (exit code {process.returncode}):\n{output}")
    events = [json.loads(line) for line in next(out.glob("*/events/harness.jsonl")).read_text().splitlines()]
    at = {event["kind"]: event["mono_s"] for event in events}
    start, stop = at["job.started"], at["job.exited"]
    stages = {event["data"]["stage"]: event["mono_s"] for event in events if event["kind"] == "run.stage"}
    result = json.loads(next(out.glob("*/result.json")).read_text())
    assert result["steps"] == steps, output
    return Watched(
        end - begun, start - begun, stop - start, end - stop, stages["end"] - stages["inventory"],
        processor.around(start, stop),
    )  # fmt: skip


def main() -> int:
    from intervals import interval

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, choices=range(2, 31), metavar="2..30")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    alone: list[float] = []
    under: list[Watched] = []
    print(
        f"{'pair':>4}  {'bare':>7}  {'watched':>8}  {'extra':>6}  {'before':>6}  {'job':>6}  {'after':>6}  {'core':>6}"
    )
    for pair in range(given.pairs):
        for way in ("bare", "watched") if pair % 2 else ("watched", "bare"):
            with tempfile.TemporaryDirectory() as name:
                if way == "bare":
                    alone.append(bare(given.steps, Path(name)))
                else:
                    under.append(watched(given.steps, Path(name)))
        a, b = alone[-1], under[-1]
        print(
            f"{pair:4}  {a:7.2f}  {b.whole:8.2f}  {b.whole - a:+6.2f}  {b.before:6.2f}  {b.job:6.2f}  {b.after:6.2f}  "
            f"{b.processor[1] / b.job:6.1%}",
            flush=True,
        )
    extra = [run.whole - job for run, job in zip(under, alone, strict=True)]
    slower = [run.job - job for run, job in zip(under, alone, strict=True)]
    base = statistics.median(alone)
    for name, differences in (("whole", extra), ("job alone", slower)):
        mean, low, high = interval(differences)
        median = statistics.median(differences)
        share = f"{median / base:+.1%} of the bare job"
        print(f"{name}: median {median:+.2f} s, mean {mean:+.2f} s [{low:+.2f}, {high:+.2f}], {share}")
    before, after, inventory = (statistics.median(getattr(run, part) for run in under) for part in PARTS)
    used = [statistics.median(column) for column in zip(*(run.processor for run in under), strict=True)]
    share = statistics.median(run.processor[1] / run.job for run in under)
    print(
        f"before the job {before:.2f} s (processor {used[0]:.2f} s); after it {after:.2f} s "
        f"(processor {used[2]:.2f} s), of which {inventory:.2f} s reads the checkpoints; "
        f"{share:.1%} of a core while it runs"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
