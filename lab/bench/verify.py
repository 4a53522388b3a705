"""Measures how fast `torchaos verify` reads, compared with other readers of the same bytes, and what a manifest adds to
a save.

A checkpoint of torch.distributed.checkpoint and a safetensors file are saved under the agent, so that both have
manifests. Then, with a warm page cache, each is read several times in turn by cat, by sha256sum, xxhsum or b3sum (if
they are installed), by verify with a single check and with all checks, and by the loader of torch or safetensors. A
rate is the size of the checkpoint divided by the median time of the process, without the time for imports in verify and
the loaders. Aim: digests at 0.7 of cat's rate, with at most 300 MB of memory.

Saves under the agent are made in turn with the agent on and off, in one process, because the page cache and the disk
differ more between processes than the cost that is measured. The background work of a save ends before the next save
begins, and its processor time is printed. The share that the agent adds to the time for which a save blocks is the
ratio of the medians. Aim: under 2 %. On a busy machine, the processor time of the saving thread says more.

Usage: python lab/bench/verify.py [--gb 4] [--repeats 5] [--pairs 20] [--only saves]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path

from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.wire import ENV_ATTEMPT_BASE, ENV_PLAN, ENV_RUN_ID

STATE = """
import gc, json, os, shutil, sys, time, warnings
warnings.simplefilter("ignore")
import torch
from pathlib import Path
torch.set_num_threads(1)
from torch.distributed.checkpoint.state_dict_saver import save
from safetensors.torch import save_file
root, size = Path(sys.argv[1]), float(sys.argv[2])
count = int(size * 1e9 / 4 / 16)
piece = torch.randn(count // 16)
state = {f"layer{n}": piece.repeat(16) + n for n in range(16)}
def opened(path):
    with open(path, "wb") as file: torch.save(state, file)
"""
MAKE = (
    STATE
    + """
save(state, checkpoint_id=root / "step-1", no_dist=True)
save_file(state, root / "m.safetensors")
"""
)
PAIRS = (
    STATE
    + """
ledger = next(one for one in gc.get_objects() if type(one).__name__ == "ManifestWriter")
agent = ledger._agent
def background():
    spent = 0.0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "torchaos":
            spent += sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return spent / os.sysconf("SC_CLK_TCK")
ways = {
    "dcp": lambda path: save(state, checkpoint_id=path, no_dist=True),
    "safetensors": lambda path: save_file(state, path),
    "torch, to a path": lambda path: torch.save(state, path),
    "torch, to an open file": opened,
}
took = {}
for name, write in ways.items():
    before = background()
    for turn in range(-1, int(sys.argv[3])):  # the first pair warms up
        for on in ((True, False), (False, True))[turn % 2]:
            agent.on, path = on, root / f"{turn}-{on}.pt"
            begun, spent = time.perf_counter(), time.thread_time()
            write(path)
            if turn >= 0:
                found = took.setdefault(name, {}).setdefault(str(on), [])
                found.append((time.perf_counter() - begun, time.thread_time() - spent))
            agent.on = True
            ledger.ended()
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    took[name]["background"] = (background() - before) / (int(sys.argv[3]) + 1)
print(json.dumps(took))
"""
)
VERIFY = """
import sys, time
from pathlib import Path
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.verify import Manifests, verify
path, run, checks = sys.argv[1], sys.argv[2], sys.argv[3]
manifests = Manifests.load(Path(run))
begun = time.perf_counter()
found = verify(Local(), path, manifests, frozenset(checks.split("+")) - {"structure"})
print(time.perf_counter() - begun)
assert not found.problems, found.problems
"""
LOAD = """
import sys, time
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
path = Path(sys.argv[1])
size = int(sys.argv[2])
state = {f"layer{n}": torch.zeros(size) for n in range(16)} if path.is_dir() else {}
begun = time.perf_counter()
if path.is_dir():
    dcp.load(state, checkpoint_id=path, no_dist=True)
else:
    for tensor in load_file(path).values():
        tensor.clone()
print(time.perf_counter() - begun)
"""


def agent_environment(run: Path) -> dict[str, str]:
    (run / "events").mkdir(parents=True, exist_ok=True)
    AgentPlan("bench", str(run / "events"), ("steps", "checkpoints")).write(run / "plan.json")
    mine = {
        "PYTHONPATH": str(files("torchaos.harness") / "agent" / "bootstrap"), ENV_PLAN: str(run / "plan.json"),
        ENV_RUN_ID: f"bench-{os.getpid()}", ENV_ATTEMPT_BASE: "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    return {**os.environ, **mine}


def under_agent(run: Path, script: str, root: Path, *arguments: float) -> str:
    """Runs the script under the agent, and returns the last line that it prints."""
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", script, str(root), *map(str, arguments)]
    environment = {**agent_environment(run), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().rpartition("\n")[2]


def timed(command: list[str], prints: bool) -> tuple[float, int]:
    """Seconds and peak memory in bytes of one process. `prints`: it measures its own time and prints the seconds."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    output = process.stdout.read() if prints else ""
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - begun
    process.returncode = status
    assert status == 0, command
    return float(output) if prints else took, usage.ru_maxrss * 1024


def readers(path: Path, run: Path, size: float) -> dict[str, tuple[list[str], bool]]:
    names = [str(file) for file in sorted(path.iterdir())] if path.is_dir() else [str(path)]
    shell = " ".join(names)
    found = {"cat > /dev/null": (["sh", "-c", f"cat {shell} > /dev/null"], False)}
    for tool in ("sha256sum", "b3sum", "xxh128sum", "xxhsum"):
        if shutil.which(tool):
            found[tool] = (["sh", "-c", f"{tool} {shell} > /dev/null"], False)
    for checks in ("structure", "digest", "crc", "nan", "digest+nan", "crc+digest+nan"):
        found[f"verify: {checks}"] = ([sys.executable, "-c", VERIFY, str(path), str(run), checks], True)
    count = int(size * 1e9 / 4 / 16) // 16 * 16
    loader = "DCP's load" if path.is_dir() else "safetensors' load"
    found[loader] = ([sys.executable, "-c", LOAD, str(path), str(count)], True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=20, help="of saves with the agent and without")
    parser.add_argument("--only", choices=("saves", "reads"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if shutil.disk_usage(root).free < 4e9 * given.gb:
            print(f"{root}: too little room on this disk", file=sys.stderr)
            return 1
        if given.only != "saves":
            under_agent(root / "run", MAKE, root / "saved", given.gb)
            for path in (root / "saved" / "step-1", root / "saved" / "m.safetensors"):
                read(path, root / "run", given.gb, given.repeats)
            shutil.rmtree(root / "saved")
        if given.only != "reads":
            compare_saves(root, min(given.gb, 1.0), given.pairs)
    return 0


def read(path: Path, run: Path, size: float, repeats: int) -> None:
    listed = sorted(path.iterdir()) if path.is_dir() else [path]
    total = sum(file.stat().st_size for file in listed)
    chosen = readers(path, run, size)
    times: dict[str, list[float]] = {name: [] for name in chosen}
    peaks = dict.fromkeys(chosen, 0)
    for turn in range(repeats + 1):  # the first turn warms the page cache
        for name, (command, prints) in chosen.items():
            took, peak = timed(command, prints)
            if turn:
                times[name].append(took)
                peaks[name] = max(peaks[name], peak)
    cat = statistics.median(times["cat > /dev/null"])
    print(f"\n{path.name}: {total / 1e9:.2f} GB, median of {repeats}")
    for name, found in times.items():
        median = statistics.median(found)
        rate = f"{total / median / 1e9:6.2f} GB/s" if name != "verify: structure" else f"{median * 1e3:6.1f} ms  "
        spread = f"{min(found):.3f} to {max(found):.3f} s"
        print(f"  {name:<26} {rate}  {cat / median:6.2f} of cat  {spread}  {peaks[name] / 1e6:6.0f} MB")


def compare_saves(root: Path, size: float, pairs: int) -> None:
    took = json.loads(under_agent(root / "pairs", PAIRS, root / "saves", size, pairs))
    print(f"\nblocking time of a save of {size:g} GB, median of {pairs}, without and with the agent in turn")
    for name, found in took.items():
        bare, under = (statistics.median(wall for wall, _ in found[on]) for on in ("False", "True"))
        bare_cpu, under_cpu = (statistics.median(cpu for _, cpu in found[on]) for on in ("False", "True"))
        best = min(found["True"])[0] / min(found["False"])[0] - 1
        print(
            f"  {name:<24} {bare:.3f} s alone, {under:.3f} s with the agent: {under / bare - 1:+.1%} "
            f"(the best of each: {best:+.1%}); its thread's processor time: {under_cpu / bare_cpu - 1:+.1%}, "
            f"and {found['background']:.3f} s of others'"
        )


if __name__ == "__main__":
    sys.exit(main())
