"""Predicts the effective training time ratio (ETTR) from single faults, then measures it under sustained failure.

    python lab/campaigns/ettr.py [--mtbf S ...] [--minutes M ...] [--out DIR]

First, a game day with rare faults shows how long a restart takes, how far apart checkpoints are, and what a checkpoint
costs. Then the faults of a day are drawn for each MTBF (`torchaos gameday --plan`), and the ratio of that day is
predicted by a replay of its faults on paper. Two expected values for the mean of many such days are printed beside it:
Meta's estimate E[ETTR] = (1 - (restart + interval / 2) / MTBF) / (1 + write / interval) (arXiv 2410.21680), for rare
faults, and Daly's complete model (2006), in which a fault may hit a job during its restart. Finally, the days are run,
for --minutes each (one number for all, or a number for each), without waiting for recoveries. Aim: within 5 percentage
points of the prediction.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchaos.harness.gameday.score import expected_ettr
from torchaos.harness.scenario.yaml_source import dumped

JOB = {
    "command": "torchrun --nproc-per-node 2 --max-restarts 500 {jobs}/gpt_ddp.py --steps 10000000 "
               "--checkpoint-dir {day}/checkpoints --checkpoint-every 100",
    "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
    "checkpoints": {"path": "{day}/checkpoints"},
}  # fmt: skip


@dataclass(frozen=True)
class Single:
    """The times that single faults show, in seconds: from a fault to the first step after it, of training between two
    checkpoints, and for which training stops to save a checkpoint."""

    restart: float
    interval: float
    write: float

    def daly(self, mtbf: float) -> float:
        """tau / (M exp(R / M) (exp((tau + delta) / M) - 1)) (J. T. Daly, A higher order estimate of the optimum
        checkpoint interval for restart dumps, Future Generation Computer Systems 22, 2006: his wall-clock time)."""
        lost = math.exp(self.restart / mtbf) * math.expm1((self.interval + self.write) / mtbf)
        return self.interval / (mtbf * lost)

    def replayed(self, faults: Sequence[float]) -> float:
        """The ratio for given faults, in seconds since the launch. Each fault removes the progress since the last
        checkpoint and starts a restart, or starts it again. The day ends when the job has made up for the last
        fault."""
        up = start = self.restart  # the launch does not count
        kept = lost = 0.0
        for at in faults:
            if at > up:
                whole, rest = divmod(at - up, self.interval + self.write)
                kept, lost = kept + whole * self.interval, min(rest, self.interval)
            up = at + self.restart
        return (kept + lost) / (up + lost - start)

    def meta(self, mtbf: float) -> float:
        return expected_ettr(mtbf, self.restart, self.interval, self.write) or 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, nargs="+", default=[10.0], help="of each measurement")
    parser.add_argument("--mtbf", type=float, nargs="+", default=[12.0, 25.0, 60.0, 150.0], help="seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--out", type=Path, help="keep the game days here")
    options = parser.parse_args()
    minutes = options.minutes * (len(options.mtbf) if len(options.minutes) == 1 else 1)
    if len(minutes) != len(options.mtbf):
        parser.error("give --minutes once, or as often as --mtbf")
    with tempfile.TemporaryDirectory() as name:
        out: Path = options.out or Path(name)
        out.mkdir(parents=True, exist_ok=True)
        single = singly(out)
        days = {}
        for mtbf, seconds in zip(options.mtbf, (60 * each for each in minutes), strict=True):
            # A Poisson process, as in the formulas: sometimes a fault hits a job that is just coming back.
            path = write(out, f"mtbf-{mtbf:g}", seconds, {"mtbf": f"{mtbf}s"}, "none", options.seed)
            faults = drawn(path)
            found = seconds / max(1, len(faults))
            days[path] = single.replayed(faults)
            average = f"{single.daly(found):.1%} (Daly), {single.meta(found):.1%} (Meta)"
            rate = f"MTBF of {mtbf:g} s ({found:.1f} s as drawn)"
            print(f"predicted at an {rate}: {days[path]:.1%}; on the average of many {average}", flush=True)
        off = max(abs(measured(path, ettr) - ettr) for path, ettr in days.items())
    print(f"the largest difference: {off:.1%}")
    return 0 if off <= 0.05 else 1


def singly(out: Path) -> Single:
    """Measures the times on a day on which the job always catches up before the next fault."""
    trace = {"trace": [f"{20 * n}s" for n in range(1, 9)]}
    alone = score_of(write(out, "alone", 200.0, trace, "recovered"))
    found = Single(alone["parts"]["first_step"]["mean"], alone["interval_s"], alone["checkpoint_s"]["mean"])
    words = f"restart {found.restart:.2f} s, interval {found.interval:.2f} s, checkpoint {found.write:.3f} s"
    print(f"from single faults: {words}", flush=True)
    return found


def measured(path: Path, predicted: float) -> float:
    score = score_of(path)
    clock, outcomes = score["clock"], score["outcomes"]
    found: float = clock["productive_s"] / sum(clock.values())
    print(f"measured, {path.stem}: {found:.1%} ({found - predicted:+.1%}), faults: {outcomes}", flush=True)
    return found


def write(out: Path, name: str, seconds: float, arrivals: dict[str, Any], gate: str, seed: int = 0) -> Path:
    """Writes the file of a game day of kills."""
    path = out / f"{name}.yaml"
    whole = {
        "gameday": name, "seed": seed, "job": JOB, "duration": f"{seconds}s", "arrivals": arrivals, "gate": gate,
        "rest": "0s", "round": {"faults": 30, "length": "10m"}, "assert": ["recovery_time"],
        "faults": [{"inject": "process.kill", "target": {"rank": "any"}}],
        "score": {"stuck": 1000, "damaged": 1000, "unproved": 1},
    }  # fmt: skip
    path.write_text(dumped(whole))
    return path


def drawn(path: Path) -> list[float]:
    """The faults of the day, in seconds since its start."""
    done = torchaos("gameday", str(path), "--plan", "--json")
    return [fault["at_s"] for game_round in json.loads(done.stdout)["rounds"] for fault in game_round["faults"]]


def score_of(path: Path) -> dict[str, Any]:
    """Runs the day, and returns its score."""
    done = torchaos("gameday", str(path), "--out", str(path.with_suffix("")))
    scores = sorted(path.with_suffix("").glob("*/score.json"), key=lambda run_dir: run_dir.stat().st_mtime)
    if not scores:
        sys.exit(f"{path}: it could not be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(scores[-1].read_text())["score"]
    return found


def torchaos(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchaos.harness", *words], capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    sys.exit(main())
