"""Runs a game day on a real cluster, and checks that it leaves nothing on any node.

    python lab/campaigns/cluster_day.py --on slurm|kubernetes --out DIR [--minutes M] [--mtbf SECONDS]

The nodes are namespaces of this machine. On Slurm, an unprivileged user starts the game day inside an allocation of
four nodes, as in a night on a staging cluster. On Kubernetes, a user with the Role of docs/kubernetes.md starts it,
with two pods on two nodes. The job is a small GPT with a rank on each node and a pause in each step, so that a day
needs little of the machine. Exit code: that of the game day, or 1 if something was left.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import yaml
from clusters import kubernetes, slurm
from clusters.machines import Machines

WORDS = ("torchaos.harness", "torchaos gameday", "slow.py")  # of command lines of processes that must not be left

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
    parser.add_argument("--on", choices=("slurm", "kubernetes"), default="slurm")
    parser.add_argument("--minutes", type=int, default=60, help="how long the day is (default 60)")
    parser.add_argument("--mtbf", type=int, default=75, help="mean time between faults (s, default 75)")
    parser.add_argument("--out", type=Path, required=True, help="where the day's folder is copied to; must not exist")
    options = parser.parse_args()
    if lacks := (slurm if options.on == "slurm" else kubernetes).missing():
        print(lacks)
        return 3
    return (on_slurm if options.on == "slurm" else on_kubernetes)(options.minutes, options.mtbf, options.out)


def on_slurm(minutes: int, mtbf_s: int, out: Path) -> int:
    with slurm.cluster() as one:
        plan = day("slurm", minutes, mtbf_s, slurm.NODES, one.shared, {})
        salloc = ("salloc", f"-N{slurm.NODES}", f"--time={minutes + 30}")
        nodes = ("head", *(f"n{number + 1}" for number in range(slurm.NODES)))
        return spend(one, plan, salloc, nodes, minutes, out)


def on_kubernetes(minutes: int, mtbf_s: int, out: Path) -> int:
    with kubernetes.cluster() as one:
        manifest = one.shared / "pods.yaml"
        manifest.write_text(yaml.safe_dump_all(one.pods("day", share=[one.shared])))
        own = {"pods": {"manifest": str(manifest), "python": sys.executable}}
        plan = day("kubernetes", minutes, mtbf_s, kubernetes.NODES, one.shared, own)
        return spend(one, plan, (), ("cp", "w1", "w2"), minutes, out)


def spend(
    cluster: Machines, plan: Mapping[str, Any], prefix: Sequence[str], nodes: Sequence[str], minutes: int, out: Path
) -> int:  # fmt: skip
    """Spends the day as the user, and copies its folder to `out`. `prefix`: words before the command of torchaos."""
    (cluster.shared / "slow.py").write_text(SLOW)
    (cluster.shared / "day.yaml").write_text(json.dumps(plan))
    begun = time.monotonic()
    command = (*prefix, "torchaos", "gameday", "day.yaml", "--out", "days", "--keep")
    code, said = cluster.as_user(*command, timeout_s=60.0 * (minutes + 40))
    print(said[-6000:])
    left = left_on(cluster, nodes)
    shutil.copytree(cluster.shared / "days", out, symlinks=True)
    print(f"exit code {code} after {time.monotonic() - begun:.0f} s; left: {', '.join(left) or 'nothing'}")
    return code or (1 if left else 0)


def day(
    launcher: str, minutes: int, mtbf_s: int, nodes: int, shared: Path, of_job: Mapping[str, Any]
) -> dict[str, Any]:  # fmt: skip
    script = "{jobs}/gpt_ddp.py --steps 1000000 --checkpoint-every 10 --step-timeout 15"
    return {
        "gameday": launcher, "seed": 1, "duration": f"{minutes}m", "arrivals": {"mtbf": f"{mtbf_s}s"}, "rest": "5s",
        "patience": "5m", "round": {"faults": 6, "length": "15m"}, "launcher": launcher, "faults": FAULTS,
        "job": {
            "command": f"torchrun --nnodes {nodes} --nproc-per-node 1 --max-restarts 50 {shared}/slow.py "
            f"{script} --checkpoint-dir {{day}}/checkpoints",
            "nodes": nodes, "timeout": "2h", "resubmit": {"times": 10, "delay": "2s"},
            "env": {
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "PET_RDZV_CONF": "join_timeout=60,last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=3",
            },
            "checkpoints": {"path": "{day}/checkpoints"}, **of_job,
        },
        "score": {"mttr": "2m"},
    }  # fmt: skip


def left_on(cluster: Machines, nodes: Sequence[str]) -> list[str]:
    """What is left: work in the scheduler, processes of torchaos or the job, undo logs, entries in the registry of
    runs."""
    left = [f"job {line}" for line in cluster.work().split()]
    for node in nodes:
        left += [f"{node}: process {pid}" for word in WORDS for pid in cluster.pids(node, word)]
        left += cluster.as_root(node, "sh", "-c", "ls -d /tmp/torchaos-*/*/undo 2>/dev/null").split()
    registry = cluster.base / "home/.local/state/torchaos/runs"
    return left + [f"registry: {path.name}" for path in registry.glob("*")]


if __name__ == "__main__":
    sys.exit(main())
