"""What a death or a damaged checkpoint costs with the newest releases.

    python lab/museum/recoveries.py [--only NAME ...] [--cell CELL ...] [--out DIR] [--minutes M]
                                   [--write PAGE ...]

Each trainer in tests/trainers is run by ready scenarios of torchaos, with the newest release of its framework. A cell
with a result in DIR/recoveries.jsonl is not run again, so an interrupted call can be continued. The table counts the
results in lab/museum/recoveries.jsonl too, which are older. --only and --cell choose rows and columns.
--write fills the marks `recoveries`, with reasons (lab/results/recoveries.md), and `cells`, without
(docs/measured/what-trainers-lose.md).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

os.environ.setdefault("DS_BUILD_OPS", "0")  # DeepSpeed is built without kernels
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import marks

from torchaos.harness.interfaces import ChaosError
from torchaos.harness.minimize.package_bisect import Packages
from torchaos.harness.record.environment import installed
from torchaos.harness.record.rundir import results_in

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = HERE / "recoveries.jsonl"
NEW_EPOCH = "faults.0.when={attempt: 0, phase: new_epoch}"
# By default, ranks of a second attempt may read the gloo addresses of the first (pytorch/pytorch#135712).
ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
WORDS = {"recovery_time": "too late", "loss_continuity": "losses", "sample_accounting": "samples",
         "lr_continuity": "learning rate", "checkpoint_integrity": "checkpoints", "state_restored": "state",
         "no_lost_work": "work lost", "parameter_digest": "weights"}  # fmt: skip


@dataclass(frozen=True)
class Framework:
    name: str
    trainer: str  # a file in tests/trainers
    package: str  # its newest release is used
    ranks: int = 2
    has_epochs: bool = True  # a loader comes to its end in each epoch, so the phase new_epoch is seen


@dataclass(frozen=True)
class Cell:
    """A column. `to_end`: a checkpoint is saved at the end of each epoch (16 steps) and at no other time, and the rank
    is killed when the next epoch begins. `deaths`: how many faults of the scenario kill a rank."""

    title: str
    scenario: str
    to_end: bool = False
    deaths: int = 1


@dataclass(frozen=True)
class Told:
    """The result of one cell."""

    framework: str
    cell: str
    release: str
    verdict: str
    reason: str
    failed: Sequence[str]


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework("plain", "plain_ddp.py", "torch"),
        Framework("transformers", "hf_trainer.py", "transformers"),
        Framework("lightning", "lightning_trainer.py", "lightning"),
        Framework("accelerate", "accelerate_trainer.py", "accelerate"),
        Framework("deepspeed", "deepspeed_trainer.py", "deepspeed", has_epochs=False),
        Framework("torchtitan", "titan_trainer.py", "torchtitan", has_epochs=False),
        Framework("ignite", "ignite_trainer.py", "pytorch-ignite"),
        Framework("mmengine", "mmengine_trainer.py", "mmengine", ranks=1, has_epochs=False),
    )
}
CELLS = {
    "mid-epoch": Cell("killed in the middle of an epoch", "resume/later-epoch"),
    "epoch-end": Cell("killed after the save at an epoch's end", "resume/epoch-end", to_end=True),
    "second": Cell("killed again after the resume", "resume/second-resume", deaths=2),
    "first-batch": Cell("killed again before the first batch", "resume/before-first-batch", deaths=2),
    "save": Cell("killed during a save", "process/kill-during-save"),
    "flipped": Cell("newest checkpoint: a bit is flipped", "checkpoint/flipped-bits"),
    "truncated": Cell("newest checkpoint: a file is cut in half", "checkpoint/truncated-checkpoint"),
    "deleted": Cell("newest checkpoint: a file is gone", "checkpoint/deleted-shard"),
}


@cache
def release(package: str) -> tuple[str, str]:
    """The newest release, and the job's PYTHONPATH for it. torch is the installed one."""
    version = installed(sys.executable)[package] if package == "torch" else Packages().releases(package)[-1]
    return version, Packages().path_with({package: version})


def command(framework: Framework, cell: Cell) -> list[str]:
    """The job: 40 steps, with a checkpoint every 5 steps, or at the end of each epoch."""
    every = ["--save-every", "16"] if cell.to_end else []
    return ["torchrun", "--nproc-per-node", str(framework.ranks), "--max-restarts", "3",
            str(ROOT / "tests" / "trainers" / framework.trainer), "--steps", "40", "--dir", "{run}/checkpoints",
            *every]  # fmt: skip


def changes(framework: Framework, cell: Cell) -> list[str]:
    """What this framework's trainer changes in the cell's scenario, for --set. A trainer whose one loader goes through
    all epochs is killed in step 23, as the scenario says; its newest checkpoint is that of an epoch's end too."""
    sets = [NEW_EPOCH] if cell.to_end and framework.has_epochs else []
    if framework.ranks == 1:
        sets += [f"faults.{place}.target.rank=0" for place in range(cell.deaths)]
    return sets


def run(framework: Framework, name: str, home: Path) -> Told:
    """Runs one cell. Raises ChaosError or OSError if the run could not be made."""
    cell = CELLS[name]
    version, path = release(framework.package)
    env = {**ENV, **({"PYTHONPATH": path} if path else {})}
    sets = [*changes(framework, cell), *(f"job.env.{key}={json.dumps(value)}" for key, value in env.items())]
    out = home / f"{framework.name}-{name}"
    words = [word for one in sets for word in ("--set", one)]
    subprocess.run(
        [sys.executable, "-m", "torchaos.harness", "run", cell.scenario, "--quiet", "--out", str(out), *words, "--json",
         str(home / "result.json"), "--", *command(framework, cell)],
        check=False, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    result = results_in(home / "result.json")[0]
    failed = [case.name for case in result.cases if case.verdict.value == "failed"]
    reason = re.sub(rf"{re.escape(str(out.resolve()))}/\S+?/job/", "{run}/", result.reason)
    return Told(framework.name, name, f"{framework.package} {version}", result.verdict.value, reason, failed)


def in_words(told: Told) -> str:
    """What a cell of the table says."""
    if told.verdict == "passed":
        return "right"
    if told.verdict == "inconclusive":
        return "no verdict"
    if "completed" in told.failed:
        return "**stays down**"
    return "**wrong**: " + ", ".join(WORDS.get(name, name) for name in told.failed)


def read(path: Path) -> dict[tuple[str, str], Told]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {(told.framework, told.cell): told for told in (Told(**json.loads(line)) for line in lines)}


def table(done: dict[tuple[str, str], Told]) -> list[str]:
    lines = [
        f"| newest release | {' | '.join(cell.title for cell in CELLS.values())} |",
        "|---" * (1 + len(CELLS)) + "|",
    ]
    notes = []
    for name in FRAMEWORKS:
        found = [done.get((name, cell)) for cell in CELLS]
        releases = [told.release for told in found if told]
        if releases:
            cells = (in_words(told) if told else "not run" for told in found)
            lines.append(f"| {releases[-1]} (`{name}`) | {' | '.join(cells)} |")
        for told in found:
            if told and told.verdict != "passed":
                notes.append(f"- {name}, {told.cell}: {told.reason.replace('<', '&lt;')}")
    return [*lines, "", *notes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", choices=FRAMEWORKS)
    parser.add_argument("--cell", action="append", default=[], metavar="CELL", choices=CELLS)
    parser.add_argument("--out", type=Path, default=Path("recoveries"), help="results and run directories")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after so long")
    parser.add_argument("--write", type=Path, nargs="+", metavar="PAGE", help="write the tables into these pages")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results, end_s = options.out / "recoveries.jsonl", time.monotonic() + 60 * options.minutes
    for name in options.only or FRAMEWORKS:
        for cell in options.cell or CELLS:
            if (name, cell) in read(results) or time.monotonic() > end_s:
                continue
            try:
                told = run(FRAMEWORKS[name], cell, options.out)
            except (ChaosError, OSError) as error:
                print(f"not run   {name} {cell}: {error}", flush=True)
                continue
            with open(results, "a") as file:
                file.write(json.dumps(asdict(told)) + "\n")
            print(f"{told.verdict}  {name} {cell} {told.release}: {in_words(told)}: {told.reason}", flush=True)
    if options.write:
        lines = table({**read(KEPT), **read(results)})
        marks.write(options.write, {"recoveries": "\n".join(lines), "cells": "\n".join(lines[: lines.index("")])})
    return 0


if __name__ == "__main__":
    sys.exit(main())
