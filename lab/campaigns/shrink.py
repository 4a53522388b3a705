"""Tests `torchaos shrink` with planted bugs that need one, two or three faults together, hidden among other faults.

    python lab/campaigns/shrink.py [--bugs N] [--only FAULT] [--seed S] [--tries N] [--fails K]

Each bug is in a stand-in trainer (shrink_job.py). A scenario of six or seven faults fails because of it, and is shrunk
by `torchaos shrink`: exactly the faults that the bug needs must be left. Every fifth bug needs a checkpoint that is
damaged when a rank is killed. --only: only bugs that need this fault. Exit code 1 if fewer than nine of ten bugs were
shrunk correctly.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from torchaos.harness.scenario.yaml_source import dumped

STAND_IN = Path(__file__).parents[2] / "tests" / "support" / "dying" / "stand_in"
JOB = Path(__file__).with_name("shrink_job.py")
# The events that the trainer can distinguish, and the fault that causes each.
FAULTS: dict[str, dict[str, Any]] = {
    "killed0": {"inject": "process.kill", "target": {"rank": 0}},
    "killed1": {"inject": "process.kill", "target": {"rank": 1}},
    "frozen0": {"inject": "process.freeze", "target": {"rank": 0}, "for": "1200ms"},
    "frozen1": {"inject": "process.freeze", "target": {"rank": 1}, "for": "1200ms"},
    "raised0": {"inject": "process.raise", "target": {"rank": 0}},
    "raised1": {"inject": "process.raise", "target": {"rank": 1}},
}
DAMAGED: dict[str, Any] = {"inject": "checkpoint.flip_bits"}  # noticed by a job that restarts soon enough
OFTEN, RARELY = 20, 250  # steps between two checkpoints; RARELY: a damaged checkpoint still exists at the restart


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bugs", type=int, default=10)
    parser.add_argument("--only", metavar="FAULT", default="", help="such as damaged, or killed0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=2)
    parser.add_argument("--fails", type=int, default=2)
    options = parser.parse_args()
    exact, bugs = 0, 0
    for number in range(options.bugs):
        draw = random.Random(f"{options.seed}/{number}")
        needs = drawn(number, draw)
        if options.only and options.only not in needs:
            continue
        bugs += 1
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            left, runs = shrunk(Path(name), needs, draw, options)
        exact += left == needs
        mark = "exact" if left == needs else "WRONG"
        took = time.monotonic() - begun
        print(f"{mark}: takes {sorted(needs)}, left {sorted(left)}; {runs} sets tried, {took:.0f} s", flush=True)
    print(f"{exact} of {bugs} shrunk to exactly what the bug takes")
    return 0 if bugs and exact >= 0.9 * bugs else 1


def drawn(number: int, draw: random.Random) -> set[str]:
    """The events that a bug needs: one, two or three."""
    if number % 5 < 4:
        return set(draw.sample(sorted(FAULTS), 1 + number % 3))
    frozen = [f"frozen{draw.randrange(2)}"] if number % 2 else []
    return {"damaged", f"killed{draw.randrange(2)}", *frozen}


def shrunk(folder: Path, needs: set[str], draw: random.Random, options: argparse.Namespace) -> tuple[set[str], int]:
    """The events that `torchaos shrink` leaves in a failing scenario, and how many sets of faults it tried."""
    path, output = folder / "many.yaml", folder / "shrunk.yaml"
    path.write_text(dumped(scenario(needs, draw)))
    done = torchaos("run", str(path), "--out", str(folder / "runs"))
    if done.returncode != 1:
        print(done.stdout[-2000:], done.stderr[-2000:])
        return set(), 0
    run = next(run_dir for run_dir in (folder / "runs").iterdir() if (run_dir / "plan.json").exists())
    tries = ("--tries", str(options.tries), "--fails", str(options.fails))
    done = torchaos("shrink", str(run), *tries, "-o", str(output), "--out", str(folder / "tries"))
    if not output.exists():
        print(done.stdout[-2000:], done.stderr[-2000:])
        return set(), 0
    left = {fault["id"] for fault in yaml.safe_load(output.read_text())["faults"]}
    return left, sum(" failed: " in line for line in done.stdout.splitlines())


def torchaos(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchaos.harness", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)


def scenario(needs: set[str], draw: random.Random) -> dict[str, Any]:
    """A scenario with the faults that the bug needs, in random order among other faults. Each fault comes when the job
    has recovered from the fault before."""
    names = [*draw.sample(sorted(FAULTS), len(FAULTS))]
    if "damaged" in needs:  # right before the death after which the job reads the checkpoint
        names.insert(next(place for place, name in enumerate(names) if name in needs and "killed" in name), "damaged")
    known = {**FAULTS, "damaged": DAMAGED}
    faults: list[dict[str, Any]] = []
    for name in names:
        when: dict[str, Any] = {"time": "300ms"}
        if faults:
            last = faults[-1]["id"]  # the damage exists until the job has written enough newer checkpoints
            when |= {"after": last, "state": "applied" if last == "damaged" else "recovered", "delay": "700ms"}
        faults.append({"id": name, **known[name], "when": when})
    python = os.path.realpath(sys.executable)
    every = RARELY if "damaged" in needs else OFTEN
    train = f"{JOB} {{run}}/checkpoints {','.join(sorted(needs))} {every}"
    return {
        "scenario": "many",
        "job": {
            "command": f"{python} {STAND_IN}/torchrun --nproc-per-node 2 --max-restarts 30 {train}",
            "env": {"PYTHONPATH": str(STAND_IN)}, "checkpoints": {"path": "{run}/checkpoints"}, "timeout": "90s",
        },
        "faults": faults,
        "steady_state": ["ranks_up", {"steps": {"at_least": 2 * every}}],
        "until": [{"recovered": {"rest": "2s"}}],
        "stop": [{"no_progress": {"longer_than": "5s"}}],
        "twin": "none",
        "assert": ["recovery_time"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
