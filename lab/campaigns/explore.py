"""Explores every moment of death of trainers of several libraries, and prints a row of outcomes for each:

    python lab/campaigns/explore.py [--only NAME ...] [--model MODEL ...] [--minutes M] [--out DIR]

A trainer whose library is not installed is left out, with a line that says so. --minutes is the limit for each trainer.
DIR gets the scenario, the log, the JSON and the directory of each exploration."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TRAINERS = Path(__file__).parents[2] / "tests" / "trainers"
ASSERTS = ["checkpoint_integrity", "loss_continuity", "sample_accounting", "state_restored", "no_lost_work"]


@dataclass(frozen=True)
class Trainer:
    command: str  # after torchrun's own options
    needs: str = "torch"  # a module
    ranks: int = 2
    checkpoints: str = "{run}/out"


ALL = {
    "plain": Trainer(f"{TRAINERS}/plain_ddp.py --steps 8 --save-every 3 --dir {{run}}/out"),
    "reference": Trainer("{jobs}/gpt_ddp.py --steps 9 --checkpoint-every 4 --checkpoint-dir {run}/out"),
    "fsdp2": Trainer("{jobs}/gpt_fsdp2.py --steps 8 --checkpoint-every 3 --checkpoint-dir {run}/out"),
    "fsdp2-8": Trainer("{jobs}/gpt_fsdp2.py --steps 8 --checkpoint-every 5 --checkpoint-dir {run}/out", ranks=8),
    # Each resume begins without the rank's own disk.
    "s3": Trainer(
        "{jobs}/gpt_s3.py --steps 9 --checkpoint-every 4 --checkpoint-dir {run}/disk",
        "s3fs",
        checkpoints="s3://checkpoints",
    ),
    "lightning": Trainer(f"{TRAINERS}/lightning_trainer.py --steps 10 --save-every 3 --dir {{run}}/out", "lightning"),
    "accelerate": Trainer(f"{TRAINERS}/accelerate_trainer.py --steps 8 --save-every 3 --dir {{run}}/out", "accelerate"),
    "hf": Trainer(f"{TRAINERS}/hf_trainer.py --steps 8 --save-every 3 --dir {{run}}/out", "transformers"),
    "titan": Trainer(f"{TRAINERS}/titan_trainer.py --steps 8 --save-every 3 --dir {{run}}/out", "torchtitan"),
    "deepspeed": Trainer(f"{TRAINERS}/deepspeed_trainer.py --steps 8 --save-every 3 --dir {{run}}/out", "deepspeed"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=ALL, default=[name for name in ALL if name != "fsdp2-8"])
    parser.add_argument("--model", nargs="*", default=["process-death"])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--out", type=Path, default=Path("torchaos-explored"))
    options = parser.parse_args()
    for name in options.only:
        if importlib.util.find_spec(ALL[name].needs) is None:
            print(f"{name}: left out, because {ALL[name].needs} is not installed", flush=True)
        else:
            explore(name, ALL[name], options.model, options.minutes, options.out)
    return 0


def explore(name: str, trainer: Trainer, models: list[str], minutes: float, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    scenario, told = out / f"{name}.yaml", out / f"{name}.json"
    scenario.write_text(yaml.safe_dump(scenario_of(name, trainer), sort_keys=False))
    words = [word for model in models for word in ("--model", model)]
    argv = [sys.executable, "-m", "torchaos.harness", "explore", str(scenario), "--out", str(out), *words]
    began_s = time.monotonic()
    with open(out / f"{name}.log", "w") as log:
        done = subprocess.run(
            [*argv, "--minutes", str(minutes), "--json", str(told)], stdout=log, stderr=log, check=False
        )
    print(row(name, done.returncode, json.loads(told.read_text()), time.monotonic() - began_s), flush=True)


def scenario_of(name: str, trainer: Trainer) -> dict[str, Any]:
    return {
        "scenario": name, "seed": 7,
        "job": {
            "command": f"torchrun --nproc-per-node {trainer.ranks} {trainer.command}",
            "world_size": trainer.ranks,
            "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
            "checkpoints": {"path": trainer.checkpoints}, "timeout": "10m",
        },
        "assert": ASSERTS,
    }  # fmt: skip


def row(name: str, code: int, found: dict[str, Any], seconds: float) -> str:
    outcomes = found.get("outcomes", [])
    if not outcomes:
        return f"{name}: exit code {code}: {found['result']['reason']}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(one["kind"] for one in outcomes).items())
    spared = sum(bool(one["like"]) for one in outcomes)
    forked = sum(one["warm"] and not one["like"] for one in outcomes)
    shown = sum(bool(one["shown_by"]) for one in outcomes)
    rest = len(outcomes) - spared - forked
    resumes_s = sum(one["seconds"] for one in outcomes)
    return (
        f"{name}: {len(outcomes)} states ({kinds}); {forked} by forked ranks ({shown} of them fail as a cold start has "
        f"shown), {rest} by a cold start, {spared} not resumed; {seconds:.0f} s with the recording, {resumes_s:.0f} s "
        "of resumes"
    )


if __name__ == "__main__":
    sys.exit(main())
