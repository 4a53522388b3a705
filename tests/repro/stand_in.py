"""A stand-in for torchrun and for a trainer under it: `stand_in.py FOLDER --steps N [--forget] [--noisy] ...`. As
torchrun it starts two ranks, and starts both again when one dies. As a rank it makes steps; rank 0 prints them, and all
state is in FOLDER/state.json. Each rank has a child that inherits its RANK, like a data-loader worker."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

PYTHON = [sys.executable, "-S"]  # without packages: it starts in a third of the time


def torchrun(args: argparse.Namespace) -> int:
    args.folder.mkdir(parents=True, exist_ok=True)
    for _attempt in range(1 + args.max_restarts):
        ranks = [
            subprocess.Popen([*PYTHON, __file__, *sys.argv[1:]], env={**os.environ, "RANK": str(rank)})
            for rank in range(2)
        ]
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(0.01)
        for rank in ranks:
            rank.kill()
            rank.wait()
        if not any(codes):
            return 0
    return 1


def train(args: argparse.Namespace, rank: int) -> None:
    worker = subprocess.Popen([*PYTHON, "-c", "import time; time.sleep(600)"])
    (args.folder / f"worker-{rank}-{worker.pid}").touch()

    def leave(*_: object) -> None:
        worker.kill()
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)
    path, state = args.folder / "state.json", {"step": 0, "momentum": 0.0}
    if path.exists():
        if args.dies_after_restart:
            sys.exit(3)
        state = json.loads(path.read_text())
        state["momentum"] = 0.0 if args.forget else state["momentum"]
    while state["step"] < args.steps:
        time.sleep(args.pace)
        state["step"] += 1
        state["momentum"] = 0.9 * state["momentum"] + state["step"]
        loss = state["momentum"] + (random.random() if args.noisy else 0.0)
        if rank == 0:
            print(f"step {state['step']} loss {loss:.6g}", flush=True)
            if state["step"] % 4 == 0:
                path.with_suffix(".tmp").write_text(json.dumps(state))
                path.with_suffix(".tmp").replace(path)
    worker.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--pace", type=float, default=0.1)  # a busy machine is late to kill
    parser.add_argument("--max-restarts", type=int, default=2)
    for flag in ("forget", "noisy", "dies-after-restart"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options, int(os.environ["RANK"]))
    else:
        sys.exit(torchrun(options))
