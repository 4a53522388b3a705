"""Predict the effective training time ratio from single faults, then measure it under sustained failure.

    python ci/campaigns/ettr.py [--minutes M] [--mtbf S ...] [--out DIR]

First a game day with faults far apart tells how long a restart takes, how far apart checkpoints are, and what one
costs. From these E[ETTR] = (1 - (restart + interval / 2) / MTBF) / (1 + write / interval) (arXiv 2410.21680) is worked
out for each MTBF, and printed before anything else is run. Then a game day is run for each, without waiting for
recoveries, for --minutes or for twenty faults, whatever is longer, and its ETTR printed beside. Aim: within 5 points.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from torchaos.harness.gameday.score import expected_ettr

FAULTS = 20
JOB = {
    "command": "torchrun --nproc-per-node 2 --max-restarts 500 {jobs}/gpt_ddp.py --steps 10000000 "
               "--checkpoint-dir {day}/checkpoints --checkpoint-every 100",
    "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
    "checkpoints": {"path": "{day}/checkpoints"},
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each measurement, at least")
    parser.add_argument("--mtbf", type=float, nargs="+", default=[12.0, 25.0, 60.0, 150.0], help="seconds")
    parser.add_argument("--out", type=Path, help="keep the game days here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        out = options.out or Path(name)
        # The job catches up before the next one comes: each is a fault by itself.
        alone = day(out, "alone", 300.0, {"trace": [f"{30 * n}s" for n in range(1, 9)]}, "recovered")
        restart, interval = alone["parts"]["first_step"]["mean"], alone["interval_s"]
        write = alone["checkpoint_s"]["mean"]
        print(f"from single faults: restart {restart:.2f} s, interval {interval:.2f} s, checkpoint {write:.3f} s")
        predicted = {mtbf: expected_ettr(mtbf, restart, interval, write) or 0.0 for mtbf in options.mtbf}
        for mtbf, ettr in predicted.items():
            print(f"predicted at an MTBF of {mtbf:g} s: {ettr:.1%}", flush=True)
        off = 0.0
        for mtbf, ettr in predicted.items():
            seconds = max(60 * options.minutes, FAULTS * mtbf)
            # Poisson, as the formula has it: now and then a fault hits a job that is just coming back.
            score = day(out, f"mtbf-{mtbf:g}", seconds, {"mtbf": f"{mtbf}s"}, "none")
            clock = score["clock"]
            found = clock["productive_s"] / sum(clock.values())
            off = max(off, abs(found - ettr))
            many = sum(score["outcomes"].values())
            print(f"measured at an MTBF of {mtbf:g} s: {found:.1%} ({found - ettr:+.1%}), {many} faults", flush=True)
    print(f"the largest difference: {off:.1%}")
    return 0 if off <= 0.05 else 1


def day(out: Path, name: str, seconds: float, arrivals: dict[str, Any], gate: str) -> dict[str, Any]:
    """The score of a game day of kills. Its rounds have no fault later than three minutes."""
    path = out / f"{name}.yaml"
    out.mkdir(parents=True, exist_ok=True)
    whole = {
        "gameday": name, "job": JOB, "duration": f"{seconds}s", "arrivals": arrivals, "gate": gate, "rest": "0s",
        "round": {"faults": 30, "length": "10m"}, "assert": ["recovery_time"],
        "faults": [{"inject": "process.kill", "target": {"rank": "any"}}],
        "score": {"stuck": 1000, "damaged": 1000, "unproved": 1},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(whole, sort_keys=False))
    command = [sys.executable, "-m", "torchaos.harness", "gameday", str(path), "--out", str(out / name)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(next((out / name).glob("*/score.json")).read_text())["score"]
    return found


if __name__ == "__main__":
    sys.exit(main())
