"""Runs a game day on a real Slurm cluster of four nodes, and checks that it leaves nothing on any node.

    python ci/campaigns/cluster_day.py --out DIR [--minutes M] [--mtbf SECONDS]

The nodes are namespaces of this machine. An unprivileged user starts the game day inside an allocation of four nodes,
as in a night on a staging cluster. The job is a small GPT on four ranks with a pause in each step, so that a day needs
little of the machine. Exit code: that of the game day, or 1 if something was left.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from clusters.slurm import NODES, Slurm, cluster, missing

PAUSE_S = 0.5
SLOW = f"""\
import runpy, sys, time
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: time.sleep({PAUSE_S}))
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FAULTS = [
    {"inject": "process.kill", "weight": 3, "target": {"rank": "any"}, "cause": "a rank dies"},
    {"inject": "process.raise", "weight": 1, "target": {"rank": "any"}, "cause": "an error in the trainer"},
    {"inject": "process.freeze", "weight": 2, "target": {"rank": "any"}, "for": "6s", "cause": "a hang"},
    {"inject": "data.stall", "weight": 1, "target": {"rank": "any"}, "for": "4s", "cause": "a loader that hangs"},
    {"inject": "node.freeze", "weight": 3, "target": {"node": "any"}, "for": "5s", "cause": "a machine hangs"},
    {"inject": "node.kill", "weight": 3, "target": {"node": "any"}, "cause": "a machine dies"},
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=60, help="how long the day is (default 60)")
    parser.add_argument("--mtbf", type=int, default=75, help="mean time between faults (s, default 75)")
    parser.add_argument("--out", type=Path, required=True, help="where the day's folder is copied to; must not exist")
    options = parser.parse_args()
    if lacks := missing():
        print(lacks)
        return 3
    with cluster() as slurm:
        (slurm.shared / "slow.py").write_text(SLOW)
        (slurm.shared / "day.yaml").write_text(json.dumps(day(options.minutes, options.mtbf, slurm)))
        begun = time.monotonic()
        code, said = slurm.as_user(
            "salloc", f"-N{NODES}", f"--time={options.minutes + 30}", "torchaos", "gameday", "day.yaml",
            "--out", "days", "--keep", timeout_s=60.0 * (options.minutes + 40),
        )  # fmt: skip
        print(said[-6000:])
        left = left_on(slurm)
        shutil.copytree(slurm.shared / "days", options.out, symlinks=True)
    print(f"exit code {code} after {time.monotonic() - begun:.0f} s; left: {', '.join(left) or 'nothing'}")
    return code or (1 if left else 0)


def day(minutes: int, mtbf_s: int, slurm: Slurm) -> dict[str, object]:
    script = "{jobs}/gpt_ddp.py --steps 1000000 --checkpoint-every 10 --step-timeout 15"
    return {
        "gameday": "slurm", "seed": 1, "duration": f"{minutes}m", "arrivals": {"mtbf": f"{mtbf_s}s"}, "rest": "5s",
        "patience": "5m", "round": {"faults": 6, "length": "15m"}, "launcher": "slurm", "faults": FAULTS,
        "job": {
            "command": f"torchrun --nnodes {NODES} --nproc-per-node 1 --max-restarts 50 {slurm.shared}/slow.py "
            f"{script} --checkpoint-dir {{day}}/checkpoints",
            "nodes": NODES, "timeout": "2h", "resubmit": {"times": 10, "delay": "2s"},
            "env": {
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "PET_RDZV_CONF": "join_timeout=60,last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=3",
            },
            "checkpoints": {"path": "{day}/checkpoints"},
        },
        "score": {"mttr": "2m"},
    }  # fmt: skip


def left_on(slurm: Slurm) -> list[str]:
    """What is left: work in Slurm, processes of torchaos or the job, undo logs, entries in the registry of runs."""
    left = [f"job {line}" for line in slurm.work().split()]
    for node in ["head", *(f"n{number + 1}" for number in range(NODES))]:
        left += [
            f"{node}: process {pid}"
            for word in ("torchaos.harness", "torchaos gameday", "slow.py")
            for pid in slurm.pids(node, word)
        ]
        left += slurm.as_root(node, "sh", "-c", "ls -d /tmp/torchaos-*/*/undo 2>/dev/null").split()
    registry = slurm.base / "home/.local/state/torchaos/runs"
    return left + [f"registry: {path.name}" for path in registry.glob("*")]


if __name__ == "__main__":
    sys.exit(main())
