"""Damages checkpoints that a job saved under the agent, and counts the damages that `verify` finds, with and without
the manifest.

Each format is damaged --damages times, as the seed decides: a flipped bit anywhere in any file, several flipped bits, a
zeroed block, a cut end, a deleted file, a file of an older save. With the manifest, every damage must be found; the
table shows the share that is found without it. Then --intact intact checkpoints are verified: there may be no alarm.

Usage: python lab/campaigns/damage_checkpoints.py [--damages 2000] [--intact 500] [--seed 1]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.resources import files as resources
from pathlib import Path

from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.verify import Manifests, verify
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.wire import ENV_ATTEMPT_BASE, ENV_PLAN, ENV_RUN_ID
from torchaos.harness.record.result import ExitCode

# Saves the same kind of state a few times in each format: STEPS saves, numbered from 1.
JOB = """
import os, sys, warnings
import torch
from pathlib import Path
warnings.simplefilter("ignore")
from torch.distributed.checkpoint.state_dict_saver import save
from safetensors.torch import save_file
root, seed, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = torch.Generator().manual_seed(seed)
def state(step):
    size = int(torch.randint(8, 300, (1,), generator=draw))
    weights = {f"layer{n}.weight": torch.randn(size, 64, generator=draw) for n in range(4)}
    weights["half"] = torch.randn(size, generator=draw).to(torch.bfloat16)
    weights["mask"] = torch.full((4, 4), float("-inf")).triu(1)
    step_of = torch.tensor(float(step))
    moments = {n: {"step": step_of.clone(), "exp_avg": torch.randn(size, 64, generator=draw)} for n in range(4)}
    rng = {"torch": torch.get_rng_state(), "python": (3, tuple(range(625)), None)}
    return {"model": weights, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}, "rng": rng, "step": step}
for step in range(1, steps + 1):
    one = state(step)
    (root / "torch").mkdir(exist_ok=True)
    torch.save(one, root / "torch" / f"step-{step}.tmp")
    os.rename(root / "torch" / f"step-{step}.tmp", root / "torch" / f"step-{step}.pt")
    (root / "open").mkdir(exist_ok=True)
    with open(root / "open" / f"step-{step}.pt", "wb") as file: torch.save(one, file)
    save(one, checkpoint_id=root / "dcp" / f"step-{step}", no_dist=True)
    folder = root / "folder" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file(one["model"], folder / "model.safetensors")
    torch.save(one["optimizer"], folder / "optimizer.pt")
    torch.save(one["rng"], folder / "rng_state.pth")
    (root / "safetensors").mkdir(exist_ok=True)
    save_file(one["model"], root / "safetensors" / f"step-{step}.safetensors")
"""
FORMATS = ("torch", "open", "dcp", "folder", "safetensors")


def save_all(run: Path, seed: int, steps: int) -> None:
    """Runs the job with the agent in it, as the launcher would."""
    (run / "events").mkdir(parents=True)
    (run / "job").mkdir()
    AgentPlan("campaign", str(run / "events"), ("steps", "checkpoints")).write(run / "plan.json")
    bootstrap = str(resources("torchaos.harness") / "agent" / "bootstrap")
    mine = {
        "PYTHONPATH": bootstrap, ENV_PLAN: str(run / "plan.json"), ENV_RUN_ID: f"campaign-{os.getpid()}",
        ENV_ATTEMPT_BASE: "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    subprocess.run(
        [sys.executable, "-c", JOB, str(run / "job"), str(seed), str(steps)], env={**os.environ, **mine}, check=True
    )


def data_files(checkpoint: Path) -> list[Path]:
    return [checkpoint] if checkpoint.is_file() else sorted(path for path in checkpoint.rglob("*") if path.is_file())


def write(path: Path, at: int, data: bytes) -> bool:
    """Writes bytes into a file; False if that changes nothing."""
    with open(path, "r+b") as file:
        file.seek(at)
        if file.read(len(data)) == data:
            return False
        file.seek(at)
        file.write(data)
    return True


def flip(path: Path, draw: random.Random, _older: Path, count: int = 1) -> bool:
    data = bytearray(path.read_bytes())
    for bit in draw.sample(range(8 * len(data)), count):
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return True


def zero(path: Path, draw: random.Random, _older: Path) -> bool:
    at = draw.randrange(path.stat().st_size)
    return write(path, at, bytes(min(draw.choice((64, 512, 4096)), path.stat().st_size - at)))


def cut(path: Path, draw: random.Random, _older: Path) -> bool:
    os.truncate(path, draw.randrange(path.stat().st_size))
    return True


def delete(path: Path, draw: random.Random, _older: Path) -> bool:
    path.unlink()
    return True


def swap(path: Path, draw: random.Random, older: Path) -> bool:
    if older.read_bytes() == path.read_bytes():
        return False
    shutil.copyfile(older, path)
    return True


DAMAGES: dict[str, Callable[[Path, random.Random, Path], bool]] = {
    "flip a bit": flip, "flip 2 to 9 bits": lambda path, draw, older: flip(path, draw, older, draw.randint(2, 9)),
    "zero a block": zero, "cut off": cut, "delete a file": delete, "older file": swap,
}  # fmt: skip


def campaign(run: Path, work: Path, form: str, count: int, draw: random.Random) -> Counter[tuple[str, str]]:
    """Counts how often each damage was made, found with the manifest, found without it, and located to the bit."""
    manifests, seen = Manifests.load(run), Counter[tuple[str, str]]()
    saves = sorted((run / "job" / form).iterdir())
    newest, older = saves[-1], saves[0]
    while sum(seen[name, "made"] for name in DAMAGES) < count:
        name = draw.choice(list(DAMAGES))
        place = draw.choice(data_files(newest))
        if name == "delete a file" and newest.is_file():
            continue
        kept = place.read_bytes()
        old = older / place.relative_to(newest) if newest.is_dir() else older
        try:
            if not DAMAGES[name](place, draw, old):
                continue
            seen[name, "made"] += 1
            files = Local()
            with_it = verify(files, str(newest), manifests)
            without = verify(files, str(newest))
            files.close()
            seen[name, "found"] += with_it.code is ExitCode.FAILED
            seen[name, "bare"] += without.code is ExitCode.FAILED
            seen[name, "named"] += any(problem.bits and problem.kind == "digest" for problem in with_it.problems)
            if with_it.code is not ExitCode.FAILED:
                print(f"NOT FOUND: {form}, {name} in {place.name}", flush=True)
        finally:
            place.write_bytes(kept)
    return seen


def intact(runs: Path, count: int, seed: int) -> int:
    """The number of alarms about `count` intact checkpoints, verified with and without their manifests."""
    alarms = checked = 0
    number = 0
    while checked < count:
        run = runs / f"intact-{number}"
        number += 1
        save_all(run, seed + number, 4)
        manifests, files = Manifests.load(run), Local()
        for path in formats.find(files, str(run / "job")):
            for known in (manifests, None):
                found = verify(files, path, known)
                wrong = found.code is ExitCode.FAILED or (known and found.code is not ExitCode.PASSED)
                if wrong:
                    alarms += 1
                    print(f"ALARM: {path}: {[problem.text for problem in found.problems]} {found.unseen}", flush=True)
            checked += 1
        files.close()
        shutil.rmtree(run)
    print(f"{checked} intact checkpoints, each with its manifest and without: {alarms} alarms")
    return alarms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--damages", type=int, default=2000, help="for each format")
    parser.add_argument("--intact", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        save_all(work / "run", given.seed, 2)
        print(f"{'format':<12} {'damage':<18} {'made':>5} {'found':>6} {'without manifest':>17} {'bit named':>10}")
        for form in FORMATS:
            seen = campaign(work / "run", work, form, given.damages, random.Random(f"{given.seed} {form}"))
            for kind in DAMAGES:
                made = seen[kind, "made"]
                if made:
                    share = f"{seen[kind, 'bare']} ({seen[kind, 'bare'] / made:.1%})"
                    print(
                        f"{form:<12} {kind:<18} {made:5} {seen[kind, 'found']:6} {share:>17} {seen[kind, 'named']:10}"
                    )
                missed += made - seen[kind, "found"]
        print(f"{missed} damages were not found with the manifest")
        return 1 if missed + intact(work, given.intact, given.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
